"""Buffers whose storage comes and goes while their views stay."""

from __future__ import annotations

from typing import Protocol

import torch


class Memory(Protocol):
    """Where buffers come from: a ``Communicator``, or plain memory for what does not travel."""

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat buffer to gather into, contents undefined; its storage object never changes."""

    def release(self, buffer: torch.Tensor) -> None:
        """Give the memory back; contents are lost, views stay valid objects."""

    def restore(self, buffer: torch.Tensor) -> None:
        """Make a released buffer usable again, contents undefined."""

    def lend(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat buffer to fill and to reduce from once, contents undefined."""


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
