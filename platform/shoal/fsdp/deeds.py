"""The steps of collectives in shared memory, and the queue that takes each step when it can.

                     publish               combine                           finish
    all_gather       write own shard ──►   (all published) done
    reduce_scatter   write own partial ──► (all published) sum own part, done
    all_reduce       write own partial ──► (all published) sum own part ──►  (all combined) copy all
    all_to_all       write own parts   ──► (all published) copy parts for this rank, done

Nobody works in the background: every call into the communicator takes the steps that have become
possible, without blocking; ``wait`` takes steps until its deed is done. Each kind of step is taken
in the order of the deeds, so one counter for each kind and rank tells the peers everything.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import torch

from shoal.fsdp.board import IN_FLIGHT, Board, Counter
from shoal.fsdp.communicator import Counts
from shoal.fsdp.lending import Block, Input
from shoal.fsdp.progress import advance_all, register
from shoal.fsdp.reduction import Reduction

_LONG_SLEEP_S = 1.0
"""Peers on this axis wake a sleeper when anything changes."""

_SHORT_SLEEP_S = 0.5e-3
"""Peers on other axes do not."""

_Step = tuple[Callable[[], bool], Callable[[], None]]


class DeedQueue:
    """The deeds of one axis that are under way on this rank."""

    def __init__(self, board: Board, rank: int, size: int) -> None:
        self.board = board
        self.rank = rank
        self.size = size
        self._num_deeds = 0
        self._steps: dict[Counter, deque[_Step]] = {
            Counter.PUBLISHED: deque(),
            Counter.COMBINED: deque(),
            Counter.FINISHED: deque(),
        }
        register(self)

    @property
    def next_sequence(self) -> int:
        """The number that the next deed will have."""
        return self._num_deeds

    def submit(self, deed: Deed) -> None:
        """Start a deed made with ``next_sequence``."""
        self._num_deeds += 1
        self.wait_for(lambda: self.board.lowest(Counter.FINISHED) > deed.sequence - IN_FLIGHT)
        self.board.sign(deed.sequence, zlib.crc32(deed.signature.encode()))
        self._steps[Counter.PUBLISHED].append((deed.can_publish, deed.publish))
        self._steps[Counter.COMBINED].append((deed.can_combine, deed.combine))
        self._steps[Counter.FINISHED].append((deed.can_finish, deed.finish))
        self.advance()

    def advance(self) -> bool:
        """Take every step that is possible now; whether some are left."""
        moved = True
        while moved:
            moved = False
            for counter, steps in self._steps.items():
                while steps and steps[0][0]():
                    _, take = steps.popleft()
                    take()
                    self.board.set(counter, self.board.own(counter) + 1)
                    moved = True
        return bool(self._steps[Counter.FINISHED])

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Take steps until the condition holds; raises ``PeerLost`` if a peer is lost."""
        if condition():
            return

        def ask() -> float | None:
            self.advance()
            steps_left = advance_all(but=self)
            if condition():
                return None
            return _SHORT_SLEEP_S if steps_left else _LONG_SLEEP_S

        self.board.wait_for(ask)


class Deed:
    """One collective, as one rank sees it."""

    def __init__(self, queue: DeedQueue, signature: str) -> None:
        """``signature`` is what every rank must agree the deed is."""
        self._queue = queue
        self._board = queue.board
        self.sequence = queue.next_sequence
        self.signature = signature

    def wait(self) -> None:
        """See ``Pending``."""
        self._queue.wait_for(self.done)

    def done(self) -> bool:
        """Whether the result is in place and this rank's input no longer needed."""
        return self._board.own(Counter.COMBINED) > self.sequence

    def can_publish(self) -> bool:
        """Whether the memory to be published in is free."""
        return True

    def publish(self) -> None:
        """Bring this rank's input into shared memory."""

    def can_combine(self) -> bool:
        """Whether every rank's input lies in shared memory."""
        return self._board.lowest(Counter.PUBLISHED) > self.sequence

    def combine(self) -> None:
        """Read the inputs."""
        self._board.check_signatures(self.sequence)

    def can_finish(self) -> bool:
        """Whether ``finish`` may run."""
        return self._board.own(Counter.COMBINED) > self.sequence

    def finish(self) -> None:
        """Read what the ranks combined."""


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


class ReduceScatter(BlockDeed):
    """Each rank sums its own part of all partials."""

    def __init__(
        self,
        queue: DeedQueue,
        where: Input,
        output: torch.Tensor,
        partial: torch.Tensor,
        reduction: Reduction,
    ) -> None:
        super().__init__(queue, f"reduce_scatter {partial.numel()}", where, partial)
        self._output = output
        self._reduction = reduction

    def combine(self) -> None:
        """Sum this rank's part."""
        super().combine()
        rank, numel = self._queue.rank, self._output.numel()
        parts = [partial.narrow(0, rank * numel, numel) for partial in self._inputs()]
        self._reduction.into(self._output, parts)


class AllReduceAtOnce(BlockDeed):
    """Each rank sums all of all partials: one step fewer, for two ranks or few elements."""

    def __init__(
        self,
        queue: DeedQueue,
        where: Input,
        output: torch.Tensor,
        partial: torch.Tensor,
        reduction: Reduction,
    ) -> None:
        super().__init__(queue, f"all_reduce at once {partial.numel()}", where, partial)
        self._output = output
        self._reduction = reduction

    def combine(self) -> None:
        """Sum everything."""
        super().combine()
        self._reduction.into(self._output, self._inputs())


class AllReduce(BlockDeed):
    """Each rank sums its own part of all partials, then copies the other ranks' sums."""

    def __init__(
        self,
        queue: DeedQueue,
        where: Input,
        sums: Block,
        output: torch.Tensor,
        partial: torch.Tensor,
        reduction: Reduction,
    ) -> None:
        super().__init__(queue, f"all_reduce {partial.numel()}", where, partial)
        self._sums = sums
        self._sums_writable_after = sums.free_after
        self._output = output
        self._reduction = reduction
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
