"""Keys and values that go round: each rank hands on what it holds while it computes with it.

    turn      0     1     2     3
    rank 0    0  ─► 3  ─► 2  ─► 1        whose keys and values are here
    rank 1    1     0     3     2
    rank 2    2     1     0     3
    rank 3    3     2     1     0

No rank ever has more than two ranks' share. In backward their gradients follow one turn behind,
each rank adding its own in fp32, and come home after the last turn; so the terms of a sum are in
ring order, from the owner on. Source: Liu et al., "Ring Attention with Blockwise Transformers",
https://arxiv.org/abs/2310.01889.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shoal.fsdp import Communicator, Pending
from shoal.parallel.context.cut import SequenceCut
from shoal.parallel.context.exchange import Visit, wide


class RingExchange:
    """An ``Exchange`` with a visit from each rank, this one first."""

    def __init__(self, communicator: Communicator, cut: SequenceCut) -> None:
        self._communicator = communicator
        self._cut = cut

    def visits(self, own: torch.Tensor) -> Iterator[Visit]:
        """See ``Exchange``."""
        for rank, tensor in self._turns(own):
            runs = self._cut.runs(rank)
            yield Visit(runs=runs, tensor=tensor, gradient=tensor.new_empty(0))

    def visits_with_gradients(self, own: torch.Tensor, gradient: torch.Tensor) -> Iterator[Visit]:
        """See ``Exchange``."""
        pending: Pending | None = None
        arriving = own.new_empty(0, dtype=wide(own.dtype))
        for rank, tensor in self._turns(own):
            added = torch.zeros_like(own, dtype=wide(own.dtype))
            yield Visit(runs=self._cut.runs(rank), tensor=tensor, gradient=added)
            if pending is not None:
                pending.wait()
                added += arriving
            arriving = torch.empty_like(added)
            pending = self._hand_on(arriving, added)
        assert pending is not None, "there is at least the rank's own turn"
        pending.wait()
        gradient.copy_(arriving)

    def _turns(self, own: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Each rank with its keys and values, while those of the next one are on their way."""
        size = self._cut.size
        rank, held = self._communicator.rank, own
        for _ in range(size - 1):
            arriving = torch.empty_like(own)
            pending = self._hand_on(arriving, held)
            yield rank, held
            pending.wait()
            rank, held = (rank - 1) % size, arriving
        yield rank, held

    def _hand_on(self, output: torch.Tensor, source: torch.Tensor) -> Pending:
        """Give ``source`` to the next rank and take ``output`` from the one before."""
        size, numel = self._cut.size, source.numel()
        counts = [[numel * (to == (rank + 1) % size) for to in range(size)] for rank in range(size)]
        return self._communicator.all_to_all(output.view(-1), source.view(-1), counts=counts)
