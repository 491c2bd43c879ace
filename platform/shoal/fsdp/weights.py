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

import torch

from shoal.errors import WorkError
from shoal.fsdp.buffer import FlatBuffer, move, run_of
from shoal.fsdp.communicator import Pending
from shoal.fsdp.grid import Grid
from shoal.fsdp.layout import GlobalLayout
from shoal.fsdp.memory import Memory
from shoal.fsdp.placement import Placement, Placements, Replicate, Shard


class WeightBuffers:
    """Main, model and whole weights, and whether they agree."""

    def __init__(
        self,
        *,
        layout: GlobalLayout,
        grid: Grid,
        placements: Placements,
        main_dtype: torch.dtype,
        compute_dtype: torch.dtype,
    ) -> None:
        self._grid = grid
        everywhere = tuple(Replicate() for _ in placements.axes)

        def buffer(kinds: tuple[Placement, ...], dtype: torch.dtype, memory: Memory) -> FlatBuffer:
            start, stop = run_of(layout, grid, kinds)
            data = memory.allocate(stop - start, dtype)
            return FlatBuffer(layout=layout, grid=grid, placements=kinds, data=data)

        def run(kinds: tuple[Placement, ...]) -> tuple[int, int]:
            return run_of(layout, grid, kinds)

        self.main = buffer(placements.optimizer, main_dtype, grid.local)
        self.main.data.zero_()  # gaps and padding included, so that no garbage is ever cast
        same_place = run(placements.parameter) == run(placements.optimizer)
        if same_place and main_dtype == compute_dtype:
            self.model = self.main
        else:
            gathered = _sharded_only_in(placements.optimizer, placements.parameter)
            self.model = buffer(placements.parameter, compute_dtype, grid.memory(gathered))
        self._memory = grid.memory(_sharded_only_in(placements.parameter, everywhere))
        if run(placements.parameter) == (0, layout.size):
            self.whole = self.model
        else:
            self.whole = buffer(everywhere, compute_dtype, self._memory)
        self.generation = 0
        self._stale = True
        self._version = self.main.data._version

    @property
    def aliased(self) -> bool:
        """Whether compute uses the main weights themselves, so that a step needs no refresh."""
        return self.model is self.main

    @property
    def stays_whole(self) -> bool:
        """Whether the whole weights rest here between uses."""
        return self.whole is self.model

    def changed(self) -> None:
        """The main weights changed; the next ``gather`` brings the change to the model weights."""
        self._stale = True
        self._version = self.main.data._version
        self.generation += 1

    def gather(self) -> Iterator[Pending]:
        """Make the whole weights usable; they are released again by ``release``."""
        if not self.aliased:
            self._check_version()
        if self._stale:
            self._stale = False
            if not self.aliased:
                yield from move(self.main, self.model, reduce_dtype=self.main.data.dtype)
        if not self.stays_whole:
            self._memory.restore(self.whole.data)
            yield from move(self.model, self.whole, reduce_dtype=self.model.data.dtype)

    def release(self) -> None:
        """Free the whole weights if they do not rest here."""
        if not self.stays_whole:
            self._memory.release(self.whole.data)

    def _check_version(self) -> None:
        """Catch most optimizers that are not known to the adapter; fused ones leave no trace."""
        if not self._stale and self.main.data._version != self._version:
            raise WorkError(
                "Main weights were changed and the weights for compute were not: call "
                "fully_shard_optimizer for each optimizer, and sync_weights after other changes."
            )


def _sharded_only_in(
    inside: tuple[Placement, ...], outside: tuple[Placement, ...]
) -> tuple[int, ...]:
    """Axes that a gather from ``inside`` to ``outside`` runs over."""
    pairs = enumerate(zip(inside, outside, strict=True))
    return tuple(
        axis
        for axis, (before, after) in pairs
        if isinstance(before, Shard) and not isinstance(after, Shard)
    )
