"""Attention of a batch whose sequences are cut among ranks, forward and backward.

The queries stay, keys and values visit (``Exchange``). Outputs over the keys of each visit are put
together in fp32 by their log-sum-exps; backward computes the scores again from the log-sum-exp of
the whole, so that nothing of the size of scores is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from shoal.errors import ConfigError
from shoal.ops.partial_attention import partial_attention, partial_attention_backward
from shoal.parallel.context.cut import SequenceCut
from shoal.parallel.context.exchange import Exchange, Visit, wide
from shoal.parallel.context.tiles import Document, Tile, tiles


def check_dropout(dropout: float) -> None:
    """Raise ``ConfigError`` unless attention weights may be computed on any rank."""
    if dropout:
        raise ConfigError(
            "model.config.attention_dropout",
            dropout,
            "the ranks of a context group each compute some weights of a token's attention, and "
            "which of them are dropped would depend on the number of ranks",
            "Set it to 0 (model.overrides), or parallel.context to 1",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CutAttention:
    """The attention of one batch; called in each layer, by all ranks of the group."""

    exchange: Exchange
    cut: SequenceCut
    rank: int
    documents: Sequence[Document]
    """What the batch holds, in whole sequences."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        window: int | None = None,
        dropout: float = 0.0,
    ) -> torch.Tensor:
        """As ``ops.attend``, for this rank's tokens: ``[B, tokens, heads, D]``.

        Raises ``ConfigError`` for a dropout.
        """
        check_dropout(dropout)
        output: torch.Tensor = _Attention.apply(query, key, value, self, window)  # type: ignore[no-untyped-call]
        return output

    def pack(self, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """This rank's part of an exchange, ``[2, B, L, heads, D]``."""
        sequences, length, *rest = key.shape
        own = key.new_zeros(2, sequences, self.cut.longest, *rest)
        own[0, :, :length] = key
        own[1, :, :length] = value
        return own

    def tiles(self, visit: Visit, window: int | None) -> Iterator[Tile]:
        """What this rank's queries see of a visit."""
        return tiles(self.cut.runs(self.rank), visit.runs, self.documents, window)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention: CutAttention,
        window: int | None,
    ) -> torch.Tensor:
        own = attention.pack(key, value)
        output, normalizer = _forward(attention, query, own, window)
        ctx.attention, ctx.window, ctx.length = attention, window, key.shape[1]
        ctx.save_for_backward(query, own, output, normalizer)
        return output

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
        query, own, output, normalizer = ctx.saved_tensors
        into_query, into_own = _backward(
            ctx.attention, gradient, query, own, output, normalizer, ctx.window
        )
        into_key, into_value = into_own[:, :, : ctx.length]
        return into_query, into_key, into_value, None, None


def _forward(
    attention: CutAttention, query: torch.Tensor, own: torch.Tensor, window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, like ``query``, and the log-sum-exp ``[B, heads, tokens]`` of all scores."""
    total = torch.zeros_like(query, dtype=wide(query.dtype), memory_format=torch.contiguous_format)
    by_head, queries = total.transpose(1, 2), query.transpose(1, 2)
    normalizer = by_head.new_full(by_head.shape[:3], -torch.inf)
    for visit in attention.exchange.visits(own):
        keys, values = visit.tensor.transpose(2, 3)
        for tile in attention.tiles(visit, window):
            rows = (tile.sequences, slice(None), tile.queries)
            columns = (tile.sequences, slice(None), tile.keys)
            output, norm = partial_attention(
                queries[rows],
                keys[columns],
                values[columns],
                causal=tile.causal,
                mask=tile.mask(query),
            )
            before = normalizer[rows]
            whole = torch.logaddexp(before, norm)
            share_before, share = (x.sub(whole).exp_().unsqueeze(-1) for x in (before, norm))
            by_head[rows].mul_(share_before).addcmul_(share, output)
            before.copy_(whole)
    return total.to(query.dtype), normalizer


def _backward(
    attention: CutAttention,
    gradient: torch.Tensor,
    query: torch.Tensor,
    own: torch.Tensor,
    output: torch.Tensor,
    normalizer: torch.Tensor,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of ``query`` and of ``own``."""
    into_query = torch.zeros_like(query, dtype=wide(query.dtype))
    into_own = torch.empty_like(own)
    into_queries = into_query.transpose(1, 2)
    queries, outputs, gradients = (x.transpose(1, 2) for x in (query, output, gradient))
    for visit in attention.exchange.visits_with_gradients(own, into_own):
        keys, values = visit.tensor.transpose(2, 3)
        into_keys, into_values = visit.gradient.transpose(2, 3)
        for tile in attention.tiles(visit, window):
            rows = (tile.sequences, slice(None), tile.queries)
            columns = (tile.sequences, slice(None), tile.keys)
            added = partial_attention_backward(
                gradients[rows],
                queries[rows],
                keys[columns],
                values[columns],
                outputs[rows],
                normalizer[rows],
                causal=tile.causal,
                mask=tile.mask(query),
            )
            into_queries[rows].add_(added[0])
            into_keys[columns].add_(added[1])
            into_values[columns].add_(added[2])
    return into_query.to(query.dtype), into_own
