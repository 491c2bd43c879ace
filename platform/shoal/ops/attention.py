"""Causal attention over packed documents, with an optional sliding window.

No ``S x S`` mask is made. A sequence that holds several documents is attended document by
document, which also saves their cross products; a window narrower than a document is attended
block of queries by block of queries, each against the keys that its window reaches:

    keys     ──────────────────────►
    queries  │▓░                       one document, window 3, blocks of 2:
             │▓▓                       block 0 needs keys 0-1
             │ ▓▓ ▓░                   block 1 needs keys 0-3
             ▼    ▓▓                   block 2 needs keys 2-5
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional

from shoal.ops.replaceable import replaceable

# Below this a block of queries costs more in calls than it saves in masked scores.
_MIN_BLOCK = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentSpans:
    """Where the documents of a batch lie: one (sequence, start, stop) a document, in order."""

    spans: tuple[tuple[int, int, int], ...]

    @staticmethod
    def of(documents: torch.Tensor) -> DocumentSpans | None:
        """Spans of ``documents`` ``[B, S]``, whose runs of equal numbers are documents.

        None if every sequence is a single document. Reads the tensor on the host, so call it once
        a forward and not in every layer.
        """
        border = documents[:, 1:] != documents[:, :-1]
        if not bool(border.any()):
            return None
        num_sequences, length = documents.shape
        cuts: list[list[int]] = [[0] for _ in range(num_sequences)]
        for sequence, position in border.nonzero().tolist():
            cuts[sequence].append(position + 1)
        return DocumentSpans(
            spans=tuple(
                (sequence, start, stop)
                for sequence, starts in enumerate(cuts)
                for start, stop in zip(starts, [*starts[1:], length], strict=True)
            )
        )


class Attend(Protocol):
    """``attend`` for the documents of one batch."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        window: int | None = None,
        dropout: float = 0.0,
    ) -> torch.Tensor:
        """See ``attend``."""


@replaceable
def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    spans: DocumentSpans | None = None,
    window: int | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Softmax attention of each token to itself and to what precedes it in its document.

    ``query`` is ``[B, S, heads, D]``, ``key`` and ``value`` are ``[B, S, key/value heads, D]``, the
    latter number dividing the former; the result is like ``query``. ``window`` limits a token to
    that many newest positions, itself included. ``dropout`` is the probability with which each
    attention weight is dropped, drawn from torch's global generator of the device.
    """
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    if spans is None:
        return _attend_document(query, key, value, window, dropout).transpose(1, 2)
    pieces = [
        _attend_document(
            query[sequence : sequence + 1, :, start:stop],
            key[sequence : sequence + 1, :, start:stop],
            value[sequence : sequence + 1, :, start:stop],
            window,
            dropout,
        )
        for sequence, start, stop in spans.spans
    ]
    # Documents in order are the tokens of the batch in order: [B * S, heads, D].
    tokens = torch.cat([piece.squeeze(0).transpose(0, 1) for piece in pieces])
    return tokens.view(query.shape[0], query.shape[2], *tokens.shape[1:])


def _attend_document(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None, dropout: float
) -> torch.Tensor:
    """Attention within one document a batch entry; tensors are ``[B, heads, S, D]``."""
    length = query.shape[2]
    if window is None or window >= length:
        return _kernel(query, key, value, None, dropout)
    block = max(window, _MIN_BLOCK)
    pieces = []
    for start in range(0, length, block):
        stop = min(start + block, length)
        first = max(start - window + 1, 0)
        rows = torch.arange(start, stop, device=query.device).unsqueeze(1)
        columns = torch.arange(first, stop, device=query.device)
        mask = (columns <= rows) & (columns > rows - window)
        piece = (query[:, :, start:stop], key[:, :, first:stop], value[:, :, first:stop])
        pieces.append(_kernel(*piece, mask, dropout))
    return torch.cat(pieces, dim=2)


def _kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
) -> torch.Tensor:
    return functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None,
        enable_gqa=query.shape[1] != key.shape[1],
    )
