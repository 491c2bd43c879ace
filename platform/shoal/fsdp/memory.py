"""Buffers whose storage comes and goes while their views stay."""

from __future__ import annotations

from typing import Protocol

import torch


class Memory(Protocol):
    """Where buffers come from: a ``Communicator``, or plain memory for what does not travel."""

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat, full-size buffer for a gather to fill; it starts restored, contents undefined.

        Ranks of one host may share a communicator's, so nobody else writes to it, and nobody reads
        it before the first gather into it or from ``release`` to the next one. The storage object
        never changes, so views of the buffer stay valid all the while.
        """

    def release(self, buffer: torch.Tensor) -> None:
        """Give the memory of a buffer from ``allocate`` back.

        Its contents are lost, its views stay valid objects.
        """

    def restore(self, buffer: torch.Tensor) -> None:
        """Make a released buffer usable again, contents undefined."""

    def lend(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat buffer to fill and to give as ``partial`` to the next reduction; undefined first.

        It spares that reduction a copy, and must not be touched once the reduction was waited for.
        """


class LocalMemory:
    """Memory of this rank alone, on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """See ``Memory``."""
        return torch.empty(numel, dtype=dtype, device=self._device)

    def release(self, buffer: torch.Tensor) -> None:
        """See ``Memory``."""
        buffer.untyped_storage().resize_(0)

    def restore(self, buffer: torch.Tensor) -> None:
        """See ``Memory``."""
        buffer.untyped_storage().resize_(buffer.numel() * buffer.element_size())

    def lend(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """See ``Memory``."""
        return self.allocate(numel, dtype)
