"""A record of what passes through a model's communicators: collectives and staging memory."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shoal.fsdp.communicator import Communicator, Counts, Pending
from shoal.fsdp.reduction import Reduction
from shoal.fsdp.transport import Transport, communicator_for

Operation = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective of this rank."""

    operation: Operation
    ranks: tuple[int, ...]
    """Global ranks of the axis; of a message, who sends it and who receives it."""
    dtype: torch.dtype
    """What travels."""
    nbytes: int
    """Size of the whole buffer: what is gathered, what is reduced, or what this rank gives away."""


class Ledger:
    """Give ``communicator`` to ``fully_shard_context`` and read here what happened."""

    def __init__(self, transport: Transport = Transport.AUTO) -> None:
        self._transport = transport
        self.collectives: list[Collective] = []
        self.staging_bytes = 0
        """Memory of the gather buffers that are not released, and of the lent ones in use."""
        self.peak_staging_bytes = 0

    def communicator(self, group: ProcessGroup, device: torch.device) -> Communicator:
        """The communicator of an axis, recorded here."""
        ranks = tuple(dist.get_process_group_ranks(group))
        return _Recorded(communicator_for(group, device, self._transport), self, ranks)

    def sent(self, source: int, target: int, tensor: torch.Tensor) -> None:
        """One message from this rank to another was begun."""
        message = Collective(
            operation="send", ranks=(source, target), dtype=tensor.dtype, nbytes=_nbytes(tensor)
        )
        self.collectives.append(message)

    def clear(self) -> None:
        """Forget the collectives, and start a new peak from the memory in use."""
        self.collectives.clear()
        self.peak_staging_bytes = self.staging_bytes

    def count(self, operation: Operation) -> int:
        """Collectives of one kind."""
        return sum(collective.operation == operation for collective in self.collectives)

    def grow(self, nbytes: int) -> None:
        """Staging memory was taken, or given back if negative."""
        self.staging_bytes += nbytes
        self.peak_staging_bytes = max(self.peak_staging_bytes, self.staging_bytes)


class _Recorded:
    """A communicator that writes down what it is asked to do."""

    def __init__(self, inner: Communicator, ledger: Ledger, ranks: tuple[int, ...]) -> None:
        self._inner = inner
        self._ledger = ledger
        self._ranks = ranks

    @property
    def size(self) -> int:
        """See ``Communicator``."""
        return self._inner.size

    @property
    def rank(self) -> int:
        """See ``Communicator``."""
        return self._inner.rank

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """See ``Communicator``."""
        self._ledger.grow(numel * dtype.itemsize)
        return self._inner.allocate(numel, dtype)

    def release(self, buffer: torch.Tensor) -> None:
        """See ``Communicator``."""
        self._ledger.grow(-_nbytes(buffer))
        self._inner.release(buffer)

    def restore(self, buffer: torch.Tensor) -> None:
        """See ``Communicator``."""
        self._ledger.grow(_nbytes(buffer))
        self._inner.restore(buffer)

    def lend(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """See ``Communicator``."""
        buffer = self._inner.lend(numel, dtype)
        self._ledger.grow(_nbytes(buffer))
        # The storage lives as long as any view of the buffer is in use.
        storage = buffer.untyped_storage()
        weakref.finalize(storage, self._ledger.grow, -_nbytes(buffer)).atexit = False
        return buffer

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor) -> Pending:
        """See ``Communicator``."""
        self._record("all_gather", output)
        return self._inner.all_gather(output, shard)

    def reduce_scatter(
        self, output: torch.Tensor, partial: torch.Tensor, reduction: Reduction
    ) -> Pending:
        """See ``Communicator``."""
        self._record("reduce_scatter", partial)
        return self._inner.reduce_scatter(output, partial, reduction)

    def all_reduce(
        self, output: torch.Tensor, partial: torch.Tensor, reduction: Reduction
    ) -> Pending:
        """See ``Communicator``."""
        self._record("all_reduce", partial)
        return self._inner.all_reduce(output, partial, reduction)

    def all_to_all(self, output: torch.Tensor, source: torch.Tensor, *, counts: Counts) -> Pending:
        """See ``Communicator``."""
        self._record("all_to_all", source)
        return self._inner.all_to_all(output, source, counts=counts)

    def _record(self, operation: Operation, whole: torch.Tensor) -> None:
        collective = Collective(
            operation=operation, ranks=self._ranks, dtype=whole.dtype, nbytes=_nbytes(whole)
        )
        self._ledger.collectives.append(collective)


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
