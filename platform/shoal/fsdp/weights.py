"""The weight buffers of one parameter group.

    main ──cast, gather──► model ──gather──► whole
    optimizer placement    parameter         replicated; memory only while in use
    main dtype             placement         compute dtype

``model`` is ``main`` itself where placement and dtype agree, and ``whole`` is ``model`` where that
is replicated. The first step of the way runs once after each change of the main weights, the second
one each time the weights are needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from shoal.errors import WorkError
from shoal.fsdp.buffer import FlatBuffer, move, run_of
from shoal.fsdp.communicator import Pending
from shoal.fsdp.grid import Grid
from shoal.fsdp.layout import GlobalLayout
from shoal.fsdp.memory import Memory
from shoal.fsdp.placement import Placement, Placements, Replicate, Shard
from shoal.fsdp.use import Use


class Weights(Protocol):
    """The weights of a group, and the way from those that the optimizer updates to compute."""

    main: FlatBuffer
    """What the optimizer updates."""

    whole: FlatBuffer
    """What compute sees while in use; its memory comes and goes, its views stay."""

    generation: int
    """Grows whenever the main weights change."""

    @property
    def compute_bytes(self) -> int:
        """Bytes between uses besides the main weights."""

    def changed(self) -> None:
        """The main weights changed; the next ``gather`` brings the change to compute."""

    def gather(self, use: Use) -> Iterator[Pending]:
        """Bring together what ``use`` needs; it is released again by ``release``."""

    def turn(self, use: Use) -> None:
        """Make ``whole`` fit for ``use``, forward or backward, for which they were gathered."""

    def release(self) -> None:
        """Free the whole weights if they do not rest here."""


class WeightBuffers:
    """Main, model and whole weights, and whether they agree; see ``Weights``."""

    def __init__(
        self,
        layout: GlobalLayout,
        grid: Grid,
        placements: Placements,
        main_dtype: torch.dtype,
        compute_dtype: torch.dtype,
    ) -> None:
        self._grid = grid
        everywhere = tuple(Replicate() for _ in placements.axes)

        def buffer(kinds: tuple[Placement, ...], dtype: torch.dtype, memory: Memory) -> FlatBuffer:
            return FlatBuffer.allocate(layout, grid, kinds, dtype, memory.allocate)

        def run(kinds: tuple[Placement, ...]) -> tuple[int, int]:
            return run_of(layout, grid, kinds)

        self.main = buffer(placements.optimizer, main_dtype, grid.local)
        self.main.data.zero_()  # gaps and padding included, so that no garbage is ever cast
        same_place = run(placements.parameter) == run(placements.optimizer)
        if same_place and main_dtype == compute_dtype:
            self.model = self.main
        else:
            gathered = sharded_only_in(placements.optimizer, placements.parameter)
            self.model = buffer(placements.parameter, compute_dtype, grid.memory(gathered))
        self._memory = grid.memory(sharded_only_in(placements.parameter, everywhere))
        if run(placements.parameter) == (0, layout.size):
            self.whole = self.model
        else:
            self.whole = buffer(everywhere, compute_dtype, self._memory)
        self.generation = 0
        self._stale = True
        self._guard = VersionGuard(self.main.data)

    @property
    def compute_bytes(self) -> int:
        """See ``Weights``."""
        return 0 if self.aliased else self.model.nbytes

    @property
    def aliased(self) -> bool:
        """Whether compute uses the main weights themselves, so that a step needs no refresh."""
        return self.model is self.main

    @property
    def _stays_whole(self) -> bool:
        """Whether the whole weights rest here between uses."""
        return self.whole is self.model

    def changed(self) -> None:
        """See ``Weights``."""
        self._stale = True
        self._guard.accept()
        self.generation += 1

    def gather(self, use: Use) -> Iterator[Pending]:
        """See ``Weights``; these serve every use."""
        if not self.aliased and not self._stale:
            self._guard.check()
        if self._stale:
            self._stale = False
            if not self.aliased:
                yield from move(self.main, self.model)
        if not self._stays_whole:
            self._memory.restore(self.whole.data)
            yield from move(self.model, self.whole)

    def turn(self, use: Use) -> None:
        """See ``Weights``."""

    def release(self) -> None:
        """See ``Weights``."""
        if not self._stays_whole:
            self._memory.release(self.whole.data)


class VersionGuard:
    """Catches most changes of main weights by what is not known to the adapter.

    Fused optimizers leave no trace.
    """

    def __init__(self, main: torch.Tensor) -> None:
        self._main = main
        self.accept()

    def accept(self) -> None:
        """The weights are as they should be."""
        self._version = self._main._version

    def check(self) -> None:
        """Raise ``WorkError`` where they changed since."""
        if self._main._version != self._version:
            raise WorkError(
                "Main weights were changed and the weights for compute were not: call "
                "fully_shard_optimizer for each optimizer, and sync_weights after other changes."
            )


def sharded_only_in(
    inside: tuple[Placement, ...], outside: tuple[Placement, ...]
) -> tuple[int, ...]:
    """Axes that a gather from ``inside`` to ``outside`` runs over."""
    pairs = enumerate(zip(inside, outside, strict=True))
    return tuple(
        axis
        for axis, (before, after) in pairs
        if isinstance(before, Shard) and not isinstance(after, Shard)
    )
