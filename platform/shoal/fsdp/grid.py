"""The communicators of a data-parallel mesh and this rank's place in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shoal.fsdp.communicator import Communicator
from shoal.fsdp.memory import LocalMemory, Memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """One communicator per axis, outer to inner."""

    communicators: tuple[Communicator, ...]

    members: frozenset[int]
    """Global ranks of the whole mesh."""

    device: torch.device
    """Where the buffers live."""

    local: LocalMemory
    """Memory for what never travels."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Ranks on each axis."""
        return tuple(communicator.size for communicator in self.communicators)

    @property
    def ranks(self) -> tuple[int, ...]:
        """This rank's place on each axis."""
        return tuple(communicator.rank for communicator in self.communicators)

    @property
    def active(self) -> tuple[int, ...]:
        """Axes with more than one rank, outer to inner; on the others all placements are one."""
        return tuple(axis for axis, size in enumerate(self.sizes) if size > 1)

    def memory(self, axes: Sequence[int]) -> Memory:
        """Where a buffer belongs that travels along ``axes``, outer to inner: the last counts."""
        active = [axis for axis in axes if axis in self.active]
        return self.communicators[active[-1]] if active else self.local
