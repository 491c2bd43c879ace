"""All keys and values on every rank at once: one all-gather, and one reduce-scatter back.

    rank 0   ┌ chunk 0 ─ chunk 3 ┐                    chunk 0 ─ 1 ─ 2 ─ 3
    rank 1   ┌ chunk 1 ─ chunk 2 ┐   ──all-gather──►  chunk 0 ─ 1 ─ 2 ─ 3

They are let go after use and gathered again for backward, so that between the two a rank keeps its
own share only. Source: Dubey et al., "The Llama 3 Herd of Models",
https://arxiv.org/abs/2407.21783, section 3.3.2.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shoal.fsdp import Communicator, Reduction
from shoal.parallel.context.cut import Run, SequenceCut
from shoal.parallel.context.exchange import Visit, wide


class GatherExchange:
    """An ``Exchange`` with a single visit, in the order of positions."""

    def __init__(self, communicator: Communicator, cut: SequenceCut) -> None:
        self._communicator = communicator
        self._cut = cut

    def visits(self, own: torch.Tensor) -> Iterator[Visit]:
        """See ``Exchange``."""
        tensor = self._gathered(own)
        yield Visit(runs=self._runs, tensor=tensor, gradient=tensor.new_empty(0))

    def visits_with_gradients(self, own: torch.Tensor, gradient: torch.Tensor) -> Iterator[Visit]:
        """See ``Exchange``."""
        tensor = self._gathered(own)
        total = torch.zeros_like(tensor, dtype=wide(own.dtype))
        yield Visit(runs=self._runs, tensor=tensor, gradient=total)
        del tensor
        partial = self._communicator.lend(self._cut.size * own.numel(), own.dtype)
        by_rank = partial.view(self._cut.size, *own.shape)
        by_rank[:, :, :, -1] = 0  # the row of no meaning, on the ranks that have one
        for rank, shard in enumerate(by_rank):
            for run in self._cut.runs(rank):
                shard[:, :, run.part(run.start, run.stop)] = total[:, :, run.start : run.stop]
        self._communicator.reduce_scatter(
            gradient.view(-1), partial, Reduction(accumulate_dtype=wide(own.dtype))
        ).wait()

    @property
    def _runs(self) -> tuple[Run, ...]:
        return (Run(start=0, stop=self._cut.length, offset=0),)

    def _gathered(self, own: torch.Tensor) -> torch.Tensor:
        """``[2, B, S, heads, D]``."""
        received = own.new_empty(self._cut.size, *own.shape)
        self._communicator.all_gather(received.view(-1), own.view(-1)).wait()
        chunks = [
            (run.start, shard[:, :, run.part(run.start, run.stop)])
            for rank, shard in enumerate(received)
            for run in self._cut.runs(rank)
        ]
        return torch.cat([chunk for _, chunk in sorted(chunks, key=lambda item: item[0])], dim=2)
