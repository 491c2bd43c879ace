"""Collectives between GPUs. NCCL sums in an order of its own, in the dtype it is given."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.distributed import (
    AllreduceOptions,
    ProcessGroup,
    ReduceScatterOptions,
    Work,
)

from shoal.fsdp.communicator import Counts, Pending
from shoal.fsdp.gloo import finish_work
from shoal.fsdp.memory import LocalMemory
from shoal.fsdp.reduction import Reduction


class _StreamWork:
    """A collective on NCCL's stream and what follows it on the stream that waits."""

    def __init__(self, work: Work, finish: Callable[[], object] | None = None) -> None:
        self._work: Work | None = work
        self._finish = finish

    def wait(self) -> None:
        """See ``Pending``; the current stream waits, not the host."""
        if self._work is not None:
            work, self._work = self._work, None
            finish_work(work)
            if self._finish is not None:
                self._finish()


class NcclCommunicator(LocalMemory):
    """A ``Communicator`` over a process group that reduces by itself.

    The deeds run after what the current stream holds when they are called, and their results are
    there for the stream that is current at ``wait``. Memory comes from the caching allocator.
    """

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        super().__init__(device)
        self._group = group

    @property
    def size(self) -> int:
        """See ``Communicator``."""
        return self._group.size()

    @property
    def rank(self) -> int:
        """See ``Communicator``."""
        return self._group.rank()

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor) -> Pending:
        """See ``Communicator``."""
        return _StreamWork(self._group._allgather_base(output, shard))

    @torch.no_grad()
    def reduce_scatter(
        self, output: torch.Tensor, partial: torch.Tensor, reduction: Reduction
    ) -> Pending:
        """See ``Communicator``."""
        total = torch.empty_like(output, dtype=reduction.accumulate_dtype)
        work = self._group._reduce_scatter_base(
            total, partial.to(reduction.accumulate_dtype), ReduceScatterOptions()
        )
        return _StreamWork(work, lambda: reduction.write(output, total))

    @torch.no_grad()
    def all_reduce(
        self, output: torch.Tensor, partial: torch.Tensor, reduction: Reduction
    ) -> Pending:
        """See ``Communicator``."""
        total = partial.to(reduction.accumulate_dtype, copy=True)
        work = self._group.allreduce([total], AllreduceOptions())
        return _StreamWork(work, lambda: reduction.write(output, total))

    def all_to_all(self, output: torch.Tensor, source: torch.Tensor, *, counts: Counts) -> Pending:
        """See ``Communicator``."""
        received, sent = [row[self.rank] for row in counts], list(counts[self.rank])
        return _StreamWork(self._group.alltoall_base(output, source, received, sent))
