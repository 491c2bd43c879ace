"""The ranks that share the tokens of each sequence, as the decoder uses them.

Every rank of the group reads the same sequences, whole: tokens, labels (shifted already, so that no
cut parts a token from its label), positions and documents. The decoder cuts them as its first act;
from there on each rank has its own tokens only, and ranks meet in attention. Losses are sums, so
those of a group's ranks add up to that of the sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import torch
from torch.distributed import ProcessGroup

from shoal import ops
from shoal.fsdp import Communicator, Reduction, communicator_for
from shoal.parallel.context.attention import CutAttention
from shoal.parallel.context.cut import SequenceCut
from shoal.parallel.context.gather import GatherExchange
from shoal.parallel.context.ring import RingExchange
from shoal.parallel.context.tiles import Document
from shoal.topology import Axis, Topology

ExchangeKind: TypeAlias = Literal["gather", "ring"]

_EXCHANGES: dict[ExchangeKind, type[GatherExchange] | type[RingExchange]] = {
    "gather": GatherExchange,
    "ring": RingExchange,
}


class ContextParallel:
    """One group, seen by one of its ranks."""

    def __init__(self, communicator: Communicator, kind: ExchangeKind) -> None:
        """``kind`` says how keys and values come to other ranks."""
        self._communicator = communicator
        self._exchange = _EXCHANGES[kind]

    @classmethod
    def over(
        cls,
        topology: Topology,
        device: torch.device,
        kind: ExchangeKind,
        communicators: Callable[[ProcessGroup, torch.device], Communicator] = communicator_for,
    ) -> ContextParallel | None:
        """This rank's group, inside the default process group; None where sequences stay whole.

        Every rank calls it. ``communicators`` makes the communicator of the group.
        """
        if topology.context == 1:
            return None
        return cls(communicators(topology.process_group(Axis.CONTEXT), device), kind)

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part of ``tensor`` ``[B, S]``; raises ``ConfigError`` if S is too short."""
        return self._cut(tensor.shape[1]).take(tensor, self._communicator.rank)

    def attention(self, shape: tuple[int, int], spans: ops.DocumentSpans | None) -> CutAttention:
        """Attention in a batch of ``shape`` (B, S) with documents in ``spans``."""
        num_sequences, length = shape
        documents = [Document(sequences=slice(0, num_sequences), start=0, stop=length)]
        if spans is not None:
            documents = [
                Document(sequences=slice(sequence, sequence + 1), start=start, stop=stop)
                for sequence, start, stop in spans.spans
            ]
        cut = self._cut(length)
        return CutAttention(
            exchange=self._exchange(self._communicator, cut),
            cut=cut,
            rank=self._communicator.rank,
            documents=documents,
        )

    def total(self, counts: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's ``counts``, which carry no gradient; like them."""
        flat = counts.detach().reshape(-1)
        result = torch.empty_like(flat)
        self._communicator.all_reduce(result, flat, Reduction(accumulate_dtype=flat.dtype)).wait()
        return result.view_as(counts)

    def _cut(self, length: int) -> SequenceCut:
        return SequenceCut(length=length, size=self._communicator.size)
