"""The collectives in shared memory, each by its steps.

                 publish               combine                           finish
all_gather       write own shard ──►   (all published) done
reduce_scatter   write own partial ──► (all published) sum own part, done
all_reduce       write own partial ──► (all published) sum own part ──►  (all combined) copy all
all_to_all       write own parts   ──► (all published) copy parts for this rank, done
"""

from __future__ import annotations

from dataclasses import replace

import torch

from shoal.fsdp.board import Counter
from shoal.fsdp.communicator import Counts
from shoal.fsdp.deed_queue import Deed, DeedQueue
from shoal.fsdp.lending import Block, Input
from shoal.fsdp.reduction import Reduction


class GatherIntoBuffer(Deed):
    """An all-gather whose output is one piece of memory that all ranks see."""

    def __init__(
        self, queue: DeedQueue, shard: torch.Tensor, own_part: torch.Tensor, writable_after: int
    ) -> None:
        super().__init__(queue, f"all_gather {shard.numel()} {shard.dtype}")
        self._shard = shard
        self._own_part = own_part
        self._writable_after = writable_after

    def can_publish(self) -> bool:
        """Whether every rank has stopped reading the former contents."""
        return self._board.lowest(Counter.RELEASED) >= self._writable_after

    @torch.no_grad()
    def publish(self) -> None:
        """Write this rank's part."""
        self._own_part.copy_(self._shard)


class BlockDeed(Deed):
    """A deed whose inputs lie in a block."""

    def __init__(self, queue: DeedQueue, what: str, where: Input, source: torch.Tensor) -> None:
        """``what`` is the kind of deed and the sizes that every rank must agree about."""
        super().__init__(queue, f"{what} {source.dtype} {where.offset}")
        self._where = where
        self._writable_after = where.block.free_after
        self._source = source

    def can_publish(self) -> bool:
        """Whether every rank has finished the deed that had the block before."""
        if self._where.lent:
            return True
        return self._board.lowest(Counter.FINISHED) >= self._writable_after

    @torch.no_grad()
    def publish(self) -> None:
        """Copy this rank's input into its part of the block, unless it lies there already."""
        if not self._where.lent:
            self._input(self._queue.rank).copy_(self._source)

    def _input(self, rank: int) -> torch.Tensor:
        where, source = self._where, self._source
        numel = self._input_numel(rank)
        return where.block.part(rank, numel, source.dtype, offset=where.offset)

    def _input_numel(self, rank: int) -> int:
        """Elements of one rank's input; the same for all ranks in most deeds."""
        return self._source.numel()

    def _inputs(self) -> list[torch.Tensor]:
        return [self._input(rank) for rank in range(self._queue.size)]


class GatherThroughBlock(BlockDeed):
    """An all-gather into memory of the caller's own."""

    def __init__(
        self, queue: DeedQueue, where: Input, output: torch.Tensor, shard: torch.Tensor
    ) -> None:
        super().__init__(queue, f"all_gather {shard.numel()}", where, shard)
        self._output = output

    @torch.no_grad()
    def combine(self) -> None:
        """Copy every rank's shard."""
        super().combine()
        torch.cat(self._inputs(), out=self._output.detach())


class ReduceDeed(BlockDeed):
    """A deed that sums what all ranks bring."""

    kind: str
    """What it is, as every rank must agree."""

    def __init__(
        self,
        queue: DeedQueue,
        where: Input,
        output: torch.Tensor,
        partial: torch.Tensor,
        reduction: Reduction,
    ) -> None:
        super().__init__(queue, f"{self.kind} {partial.numel()}", where, partial)
        self._output = output
        self._reduction = reduction


class ReduceScatter(ReduceDeed):
    """Each rank sums its own part of all partials."""

    kind = "reduce_scatter"

    def combine(self) -> None:
        """Sum this rank's part."""
        super().combine()
        rank, numel = self._queue.rank, self._output.numel()
        parts = [partial.narrow(0, rank * numel, numel) for partial in self._inputs()]
        self._reduction.into(self._output, parts)


class AllReduceAtOnce(ReduceDeed):
    """Each rank sums all of all partials: one step fewer, for two ranks or few elements."""

    kind = "all_reduce at once"

    def combine(self) -> None:
        """Sum everything."""
        super().combine()
        self._reduction.into(self._output, self._inputs())


class AllReduce(ReduceDeed):
    """Each rank sums its own part of all partials, then copies the other ranks' sums."""

    kind = "all_reduce"

    def __init__(
        self,
        queue: DeedQueue,
        where: Input,
        sums: Block,
        output: torch.Tensor,
        partial: torch.Tensor,
        reduction: Reduction,
    ) -> None:
        super().__init__(queue, where, output, partial, reduction)
        self._sums = sums
        self._sums_writable_after = sums.free_after
        self._part_numel = -(-partial.numel() // queue.size)

    def done(self) -> bool:
        """See ``Deed``."""
        return self._board.own(Counter.FINISHED) > self.sequence

    def can_combine(self) -> bool:
        """Whether all inputs are there and the memory for the sums is free."""
        free = self._board.lowest(Counter.FINISHED) >= self._sums_writable_after
        return free and super().can_combine()

    def combine(self) -> None:
        """Sum this rank's part into shared memory."""
        super().combine()
        start, numel = self._range(self._queue.rank)
        parts = [partial.narrow(0, start, numel) for partial in self._inputs()]
        replace(self._reduction, add=False).into(self._sum(self._queue.rank), parts)

    def can_finish(self) -> bool:
        """Whether every rank has summed its part."""
        return self._board.lowest(Counter.COMBINED) > self.sequence

    def finish(self) -> None:
        """Bring every rank's sum into the output."""
        into_output = replace(self._reduction, divisor=1.0)
        for rank in range(self._queue.size):
            start, numel = self._range(rank)
            into_output.into(self._output.narrow(0, start, numel), [self._sum(rank)])

    def _range(self, rank: int) -> tuple[int, int]:
        start = min(rank * self._part_numel, self._source.numel())
        return start, min(self._part_numel, self._source.numel() - start)

    def _sum(self, rank: int) -> torch.Tensor:
        _, numel = self._range(rank)
        return self._sums.part(rank, numel, self._reduction.accumulate_dtype)


class AllToAll(BlockDeed):
    """Each rank copies its own part of every rank's input."""

    def __init__(
        self,
        queue: DeedQueue,
        where: Input,
        output: torch.Tensor,
        source: torch.Tensor,
        counts: Counts,
    ) -> None:
        super().__init__(queue, f"all_to_all {counts}", where, source)
        self._output = output
        self._counts = counts

    @torch.no_grad()
    def combine(self) -> None:
        """Copy the parts for this rank."""
        super().combine()
        rank = self._queue.rank
        pairs = zip(self._inputs(), self._counts, strict=True)
        parts = [source.narrow(0, sum(row[:rank]), row[rank]) for source, row in pairs]
        torch.cat(parts, out=self._output.detach())

    def _input_numel(self, rank: int) -> int:
        return sum(self._counts[rank])
