"""Collectives over sockets: works between any hosts.

Gloo only moves bytes here. Its own reduce-scatter costs more than twice its all-reduce, sums in the
wire's dtype, and its average has been a sum; so sums are taken by this rank, in rank order.

    reduce_scatter:  all-to-all ──► each rank sums its own part
    all_reduce:      small, or two ranks: all-gather ──► each rank sums everything
                     otherwise: reduce_scatter ──► all-gather of the sums
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch.distributed import ProcessGroup, Work

from shoal.errors import PeerLost
from shoal.fsdp.communicator import SMALL_NUMEL, Counts, Pending
from shoal.fsdp.memory import LocalMemory
from shoal.fsdp.progress import advance_all, register
from shoal.fsdp.reduction import Reduction

_POLL_S = 100e-6
"""Between two looks at a collective while this process has other steps to take."""


class Done:
    """A deed that needed nobody else and is over."""

    def wait(self) -> None:
        """Return at once."""


def finish_work(work: Work) -> None:
    """Wait for a collective; a lost or silent peer becomes a ``PeerLost``."""
    try:
        work.wait()
    except RuntimeError as error:
        raise PeerLost(
            f"A collective failed, so another rank was lost or does not answer: {error}"
        ) from error


class _PendingWork:
    """A collective under way and what this rank does once it is complete."""

    def __init__(self, work: Work, finish: Callable[[], None] | None = None) -> None:
        self._work: Work | None = work
        # Not the work itself: asked whether it is complete, it waits for its lock while it holds
        # Python's. A thread of gloo that ends a collective under a profiler does the opposite: it
        # holds the work's and wants Python's, if hooks of saved tensors (recompute) were set when
        # the collective began.
        self._future = work.get_future()
        self._finish = finish

    @property
    def arrived(self) -> bool:
        """Whether ``wait`` would not have to wait."""
        return self._work is None or self._future.done()

    def wait(self) -> None:
        """See ``Pending``."""
        while not self.arrived and advance_all():
            time.sleep(_POLL_S)
        if self._work is not None:
            work, self._work = self._work, None
            finish_work(work)
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()


class GlooCommunicator(LocalMemory):
    """A ``Communicator`` over a gloo process group."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(torch.device("cpu"))
        self._group = group
        self._size = group.size()
        self._rank = group.rank()
        self._unfinished: _TwoStageAllReduce | None = None
        register(self)

    @property
    def size(self) -> int:
        """See ``Communicator``."""
        return self._size

    @property
    def rank(self) -> int:
        """See ``Communicator``."""
        return self._rank

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor) -> Pending:
        """See ``Communicator``."""
        if self._size == 1:
            output.detach().copy_(shard.detach())
            return Done()
        self._settle()
        return _PendingWork(self._gather(output, shard))

    def reduce_scatter(
        self, output: torch.Tensor, partial: torch.Tensor, reduction: Reduction
    ) -> Pending:
        """See ``Communicator``."""
        if self._size == 1:
            reduction.into(output, [partial])
            return Done()
        self._settle()
        return self._scatter(output, partial, reduction)

    def all_reduce(
        self, output: torch.Tensor, partial: torch.Tensor, reduction: Reduction
    ) -> Pending:
        """See ``Communicator``."""
        if self._size == 1:
            reduction.into(output, [partial])
            return Done()
        self._settle()
        if self._size > 2 and partial.numel() > SMALL_NUMEL:
            self._unfinished = self._in_two_stages(output, partial, reduction)
            return self._unfinished
        received = partial.new_empty(self._size * partial.numel())
        work = self._gather(received, partial)
        return _PendingWork(work, lambda: reduction.into(output, received.chunk(self._size)))

    def all_to_all(self, output: torch.Tensor, source: torch.Tensor, *, counts: Counts) -> Pending:
        """See ``Communicator``."""
        if self._size == 1:
            output.detach().copy_(source.detach())
            return Done()
        self._settle()
        received, sent = [row[self._rank] for row in counts], list(counts[self._rank])
        return _PendingWork(self._group.alltoall_base(output, source, received, sent))

    def advance(self) -> bool:
        """Start the second stage of an all-reduce once the first is over; see ``Owing``."""
        if self._unfinished is not None and self._unfinished.may_gather:
            self._settle()
        return self._unfinished is not None

    def _gather(self, output: torch.Tensor, shard: torch.Tensor) -> Work:
        return self._group._allgather_base(output, shard)

    def _scatter(
        self, output: torch.Tensor, partial: torch.Tensor, reduction: Reduction
    ) -> _PendingWork:
        received = torch.empty_like(partial)
        work = self._group.alltoall_base(received, partial, [], [])
        return _PendingWork(work, lambda: reduction.into(output, received.chunk(self._size)))

    def _in_two_stages(
        self, output: torch.Tensor, partial: torch.Tensor, reduction: Reduction
    ) -> _TwoStageAllReduce:
        part = -(-partial.numel() // self._size)
        padding = partial.new_zeros(part * self._size - partial.numel())
        padded = torch.cat([partial.detach(), padding]) if padding.numel() else partial
        sums = torch.empty(part * self._size, dtype=reduction.accumulate_dtype)
        own = sums.narrow(0, self._rank * part, part)
        scatter = self._scatter(own, padded, replace(reduction, add=False))
        write = replace(reduction, divisor=1.0)
        return _TwoStageAllReduce(output, sums, scatter, lambda: self._gather(sums, own), write)

    def _settle(self) -> None:
        """Start the second stage of an all-reduce before any later deed starts.

        Peers match collectives by the order in which they start; this makes that order the order of
        the deeds, whenever each rank happens to wait.
        """
        if self._unfinished is not None:
            unfinished, self._unfinished = self._unfinished, None
            unfinished.start_gather()


class _TwoStageAllReduce:
    """A reduce-scatter of the padded buffer, then an all-gather of the sums."""

    def __init__(
        self,
        output: torch.Tensor,
        sums: torch.Tensor,
        scatter: _PendingWork,
        gather: Callable[[], Work],
        reduction: Reduction,
    ) -> None:
        self._output = output
        self._sums = sums
        self._scatter = scatter
        self._start_gather = gather
        self._gather: _PendingWork | None = None
        self._finish = reduction

    @property
    def may_gather(self) -> bool:
        """Whether the first stage is over."""
        return self._scatter.arrived

    def start_gather(self) -> Pending:
        """Complete the first stage and start the second, on the first call."""
        if self._gather is None:
            self._scatter.wait()
        if self._gather is None:  # still: what goes on during a wait includes this
            self._gather = _PendingWork(self._start_gather(), self._write)
        return self._gather

    def wait(self) -> None:
        """See ``Pending``."""
        self.start_gather().wait()

    def _write(self) -> None:
        self._finish.into(self._output, [self._sums[: self._output.numel()]])
