"""Where the parts of a buffer live along each data-parallel axis, and the named strategies.

    strategy (outer, inner)            parameter   gradient       optimizer
    DDP     (replicate, replicate)     [R, R]      [P, P]         [R, R]
    ZeRO-1  (optimizer, optimizer)     [R, R]      [P, P]         [S0, S0]
    ZeRO-2  (gradients, gradients)     [R, R]      [S0, S0]       [S0, S0]
    ZeRO-3  (parameters, parameters)   [S0, S0]    [S0, S0]       [S0, S0]
    HSDP    (replicate, parameters)    [R, S0]     [P, S0]        [R, S0]
    HFSDP   (optimizer, parameters)    [R, S0]     [P, S0]        [S0, S0]

Axes are ordered from outer to inner. A sharded axis is never outside a replicated one, so that what
a rank holds is one run of the whole buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch.distributed.device_mesh import DeviceMesh

from shoal.config import Level
from shoal.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank of the axis holds the same values."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Each rank of the axis holds a run of rows; only dimension 0 can be split."""

    dim: int = 0


@dataclass(frozen=True, slots=True)
class Partial:
    """Each rank of the axis holds a contribution; the value is their average, or their sum."""

    op: Literal["avg", "sum"] = "avg"


Placement = Replicate | Shard | Partial

_DEPTH = {level: depth for depth, level in enumerate(Level)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Placements:
    """How a unit's parameters, gradients and optimizer state rest, one placement per axis.

    Raises ``ConfigError`` for lists that do not fit the axes, the buffer or each other.
    """

    axes: tuple[str | int, ...]
    """Mesh dimensions, by name or number (negative ones count from the end), outer to inner."""

    parameter: tuple[Placement, ...]
    """Compute weights between uses: ``Replicate`` or ``Shard``."""

    gradient: tuple[Placement, ...]
    """Gradients between microbatches: ``Partial("avg")`` or ``Shard``."""

    optimizer: tuple[Placement, ...]
    """Main weights, final gradients and optimizer state: ``Replicate`` or ``Shard``."""

    def __post_init__(self) -> None:
        allowed: dict[str, tuple[type[Placement], ...]] = {
            "parameter": (Replicate, Shard),
            "gradient": (Partial, Shard),
            "optimizer": (Replicate, Shard),
        }
        for name, kinds in allowed.items():
            self._check_list(name, kinds)
        self._check_nesting("gradient", "parameter")
        self._check_nesting("optimizer", "gradient")

    def _check_list(self, name: str, kinds: tuple[type[Placement], ...]) -> None:
        placements: tuple[Placement, ...] = getattr(self, name)
        field = f"placements.{name}"
        if not self.axes or len(placements) != len(self.axes):
            raise ConfigError(
                field,
                placements,
                f"it has {len(placements)} entries for {len(self.axes)} axes",
                "Give one placement per axis",
            )
        for placement in placements:
            if not isinstance(placement, kinds) or placement == Partial("sum"):
                names = " or ".join(kind.__name__ for kind in kinds)
                raise ConfigError(field, placement, "it cannot be used here", f"Use {names}")
            if isinstance(placement, Shard) and placement.dim != 0:
                raise ConfigError(field, placement, "flat buffers split rows only", "Use Shard(0)")
        check_suffix(field, placements)

    def _check_nesting(self, name: str, inside: str) -> None:
        outside = zip(getattr(self, name), getattr(self, inside), self.axes, strict=True)
        for placement, held, axis in outside:
            if isinstance(held, Shard) and not isinstance(placement, Shard):
                raise ConfigError(
                    f"placements.{name}",
                    placement,
                    f"the {inside} placement is sharded on axis {axis!r} and this is not",
                    "Shard it there too",
                )

    def dims(self, mesh: DeviceMesh) -> tuple[int, ...]:
        """The mesh dimensions that ``axes`` name; raises ``ConfigError`` unless these are all."""
        dims = tuple(self._dim(axis, mesh) for axis in self.axes)
        if dims != tuple(range(mesh.ndim)):
            raise ConfigError(
                "placements.axes",
                self.axes,
                f"a mesh of {mesh.ndim} dimensions needs each of them once, outer to inner",
                "Give the data-parallel part of the mesh and name its dimensions in order",
            )
        return dims

    @staticmethod
    def _dim(axis: str | int, mesh: DeviceMesh) -> int:
        if isinstance(axis, int) and -mesh.ndim <= axis < mesh.ndim:
            return axis % mesh.ndim
        names = mesh.mesh_dim_names or ()
        if isinstance(axis, str) and axis in names:
            return names.index(axis)
        raise ConfigError(
            "placements.axes",
            axis,
            f"the mesh has {mesh.ndim} dimensions named {names}",
            "Name one of them",
        )


def check_suffix(field: str, placements: Sequence[Placement]) -> None:
    """Refuse a sharded axis outside one that is not: a rank's part would not be one run."""
    sharded = [isinstance(placement, Shard) for placement in placements]
    if sharded != sorted(sharded):
        raise ConfigError(
            field,
            tuple(placements),
            "a sharded axis lies outside an axis that is not sharded",
            "Shard the inner axis too",
        )


def placements_for(
    outer: Level, inner: Level, axes: tuple[str | int, str | int] = ("outer", "inner")
) -> Placements:
    """The placements of two levels of sharding; refuses ``outer`` above ``inner``."""
    if _DEPTH[outer] > _DEPTH[inner]:
        raise ConfigError(
            "sharding.outer",
            outer.value,
            f"the outer axis cannot shard more than the inner one, which is {inner.value!r}",
            f"Raise inner to {outer.value!r} or lower outer",
        )

    def at(level: Level, otherwise: Placement) -> tuple[Placement, ...]:
        depths = (_DEPTH[outer], _DEPTH[inner])
        return tuple(Shard(0) if depth >= _DEPTH[level] else otherwise for depth in depths)

    return Placements(
        axes=axes,
        parameter=at(Level.PARAMETERS, Replicate()),
        gradient=at(Level.GRADIENTS, Partial("avg")),
        optimizer=at(Level.OPTIMIZER, Replicate()),
    )
