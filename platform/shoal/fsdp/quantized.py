"""The weight buffers of a parameter group that travels in MXFP8.

    main ──quantize, gather──► both planes ──gather──► one plane ──decode──► whole
    optimizer placement        parameter placement     while in use          bf16, in use

A plane (``shoal.fsdp.planes``) holds what forward needs of the matrices, the other what backward
needs. Only the one that is needed travels when weights are brought together, 33/64 of what bf16
takes; both do, once a step, on axes where the optimizer's state rests in parts and the weights do
not, and for backward where it computes the forward again. No block is split between ranks, so each
quantizes its own rows and the result is that of quantizing whole matrices.

``whole`` is what the products see: bf16 numbers that MXFP8 holds, of the plane that is next.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shoal.errors import ConfigError, WorkError
from shoal.fsdp.buffer import FlatBuffer, move, run_of
from shoal.fsdp.communicator import Pending
from shoal.fsdp.grid import Grid
from shoal.fsdp.layout import GlobalLayout
from shoal.fsdp.placement import Placement, Placements, Replicate
from shoal.fsdp.planes import Plane, decode, encode, plane_layout
from shoal.fsdp.use import Use
from shoal.fsdp.weights import VersionGuard, sharded_only_in
from shoal.ops.mxfp8 import BLOCK

PLANES_FOR = {
    Use.FORWARD: (Plane.FORWARD,),
    Use.BACKWARD: (Plane.BACKWARD,),
    Use.RECOMPUTED: (Plane.FORWARD, Plane.BACKWARD),
}


def check_quantized(name: str, shape: torch.Size, compute: torch.dtype, device: str) -> None:
    """Raise ``ConfigError`` unless a parameter can travel in MXFP8."""
    if len(shape) != 2 or shape[0] % BLOCK or shape[1] % BLOCK:
        problem = f"weights that travel in MXFP8 are matrices of whole blocks of {BLOCK}"
        raise ConfigError(name, tuple(shape), problem, "Do not quantize it")
    if compute is not torch.bfloat16:
        problem = "weights that travel in MXFP8 are computed with in bf16"
        raise ConfigError(f"{name}.dtype", compute, problem, "Set compute to torch.bfloat16")
    if device != "cpu":
        raise ConfigError(f"{name}.device", device, "MXFP8 is emulated on CPUs", "Use bf16")


class QuantizedWeights:
    """Main weights, their planes, and whole weights; see ``Weights``."""

    def __init__(
        self,
        layout: GlobalLayout,
        grid: Grid,
        placements: Placements,
        main_dtype: torch.dtype,
    ) -> None:
        self._grid = grid
        self.main = FlatBuffer.allocate(
            layout, grid, placements.optimizer, main_dtype, grid.local.allocate
        )
        self.main.data.zero_()
        everywhere: tuple[Placement, ...] = tuple(Replicate() for _ in placements.axes)
        self._planes = {plane: _PlaneBuffers(layout, grid, placements, plane) for plane in Plane}
        self.whole = FlatBuffer.allocate(
            layout, grid, everywhere, torch.bfloat16, grid.local.allocate
        )
        self._guard = VersionGuard(self.main.data)
        self._here: tuple[Plane, ...] = ()
        self._decoded: Plane | None = None
        self._keep = False
        self.generation = 0
        self._stale = True

    @property
    def compute_bytes(self) -> int:
        """See ``Weights``."""
        return sum(plane.model.nbytes for plane in self._planes.values())

    def changed(self) -> None:
        """See ``Weights``."""
        self._stale = True
        self._guard.accept()
        self.generation += 1

    def gather(self, use: Use) -> Iterator[Pending]:
        """See ``Weights``."""
        if not self._stale:
            self._guard.check()
        else:
            self._stale = False
            for plane in self._planes.values():
                yield from plane.refresh(self.main)
        self._here, self._keep = PLANES_FOR[use], use is Use.RECOMPUTED
        for name in self._here:
            yield from self._planes[name].gather()

    def turn(self, use: Use) -> None:
        """See ``Weights``."""
        plane = Plane.FORWARD if use is Use.FORWARD else Plane.BACKWARD
        if plane is self._decoded:
            return
        if plane not in self._here:
            raise WorkError(
                "A forward ran inside backward, where the weights of its module have come in MXFP8 "
                "for backward alone: shard it with recomputed=True."
            )
        if self._decoded is None:
            self._grid.local.restore(self.whole.data)
        buffer = self._planes[plane].whole
        for index in range(len(self.whole.layout.shapes)):
            decode(buffer.view(index), plane, self.whole.view(index))
        self._decoded = plane
        if not self._keep:
            self._let_go()

    def release(self) -> None:
        """See ``Weights``."""
        self._let_go()
        self._decoded = None
        self._grid.local.release(self.whole.data)

    def _let_go(self) -> None:
        for plane in self._planes.values():
            plane.release()
        self._here = ()


class _PlaneBuffers:
    """One plane as it rests and, while in use, whole."""

    def __init__(
        self, layout: GlobalLayout, grid: Grid, placements: Placements, plane: Plane
    ) -> None:
        self._plane = plane
        self._grid = grid
        everywhere: tuple[Placement, ...] = tuple(Replicate() for _ in placements.axes)
        self._layout = plane_layout(layout, plane)
        travelled = sharded_only_in(placements.optimizer, placements.parameter)
        self.model = self._buffer(placements.parameter, travelled)
        self._travels = sharded_only_in(placements.parameter, everywhere)
        self.whole = self.model
        if (self.model.start, self.model.stop) != (0, self._layout.size):
            self.whole = self._buffer(everywhere, self._travels)
        self._released = False

    def refresh(self, main: FlatBuffer) -> Iterator[Pending]:
        """Bring main weights that changed to where the plane rests."""
        start, stop = run_of(self._layout, self._grid, main.placements)
        at_rest = (start, stop) == (self.model.start, self.model.stop)
        data = self.model.data if at_rest else self.model.data.new_empty(stop - start)
        quantized = FlatBuffer(
            layout=self._layout, grid=self._grid, placements=main.placements, data=data
        )
        for index in range(len(main.layout.shapes)):
            encode(main.view(index), self._plane, quantized.view(index))
        if not at_rest:
            yield from move(quantized, self.model)

    def gather(self) -> Iterator[Pending]:
        """Have all of the plane here."""
        if self.whole is not self.model:
            if self._released:
                self._grid.memory(self._travels).restore(self.whole.data)
                self._released = False
            yield from move(self.model, self.whole)

    def release(self) -> None:
        """Free the whole plane if it does not rest here."""
        if self.whole is not self.model and not self._released:
            self._grid.memory(self._travels).release(self.whole.data)
            self._released = True

    def _buffer(self, placements: tuple[Placement, ...], axes: tuple[int, ...]) -> FlatBuffer:
        memory = self._grid.memory(axes).allocate
        return FlatBuffer.allocate(self._layout, self._grid, placements, torch.uint8, memory)
