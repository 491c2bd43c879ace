"""A unit: the parameters of one module that are gathered and let go together."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from enum import StrEnum

from torch import nn

from shoal.errors import WorkError
from shoal.fsdp.group import ParameterGroup
from shoal.fsdp.use import Use

_UNIT_ATTRIBUTE = "_shoal_unit"


class Phase(StrEnum):
    """What a unit is doing; it moves between resting and one of the others only::

    FORWARD <──► RESTING <──► BACKWARD
    """

    RESTING = "resting"
    FORWARD = "forward"
    BACKWARD = "backward"


class Unit:
    """Parameter groups of one module, with the phase of its life.

    A unit owns every parameter beneath its module that is not beneath the module of an inner unit.
    The module owns the unit; everything else points to either only weakly, so that all buffers are
    freed together with the module.
    """

    def __init__(
        self, module: nn.Module, groups: Sequence[ParameterGroup], *, recomputed: bool = False
    ) -> None:
        """``recomputed`` says that backward computes the module's forward again."""
        self._module = weakref.ref(module)
        self._backward = Use.RECOMPUTED if recomputed else Use.BACKWARD
        self.groups = tuple(groups)
        self.name = type(module).__name__
        self.phase = Phase.RESTING
        self.reduced = False
        """Whether the gradients of the present backward are complete and on their way."""
        self.awaits_inputs = False
        """Whether backward may still need frozen weights when all gradients have come."""

    @property
    def module(self) -> nn.Module:
        """The module, which lives at least as long as its unit is in use."""
        module = self._module()
        assert module is not None
        return module

    @property
    def num_trainable(self) -> int:
        """Parameters that want a gradient."""
        return sum(group.num_trainable for group in self.groups)

    @property
    def has_frozen(self) -> bool:
        """Whether some parameter wants no gradient."""
        return any(group.num_trainable < len(group.entries) for group in self.groups)

    @property
    def num_arrived(self) -> int:
        """Parameters whose gradient the present backward has brought."""
        return sum(g.gradients.num_arrived for g in self.groups if g.gradients is not None)

    @property
    def missing(self) -> list[str]:
        """Parameters that want a gradient and did not get one in the present backward."""
        return [entry.path for group in self.groups for entry in group.missing]

    @property
    def generation(self) -> int:
        """Grows whenever the main weights change."""
        return sum(group.weights.generation for group in self.groups)

    def enter(self, phase: Phase) -> None:
        """Begin forward or backward; raises ``WorkError`` unless the unit rests."""
        if self.phase is not Phase.RESTING:
            raise WorkError(
                f"Unit {self.name} cannot begin {phase}: it is in {self.phase} already. A module "
                "that calls itself cannot be a unit."
            )
        self.phase = phase

    def prefetch(self, phase: Phase) -> None:
        """Bring the weights for a phase on their way."""
        for group in self.groups:
            group.start_gather(self._use(phase))

    def open(self, phase: Phase) -> None:
        """Have the weights for a phase in place and registered; all groups travel at once."""
        self.prefetch(phase)
        for group in self.groups:
            group.open(self._use(phase))

    def turn(self, phase: Phase) -> None:
        """Have open weights fit for the products of a phase."""
        for group in self.groups:
            group.weights.turn(Use.FORWARD if phase is Phase.FORWARD else Use.BACKWARD)

    def _use(self, phase: Phase) -> Use:
        return Use.FORWARD if phase is Phase.FORWARD else self._backward

    def rest(self) -> None:
        """End forward or backward: let the weights go."""
        self.phase = Phase.RESTING
        self.reduced = False
        self.awaits_inputs = False
        for group in self.groups:
            group.close()

    def discard(self) -> None:
        """Come to rest after a failure, without any gradient."""
        for group in self.groups:
            group.discard()
        self.rest()


def unit_of(module: nn.Module) -> Unit | None:
    """The unit of a module that was sharded itself."""
    unit: Unit | None = module.__dict__.get(_UNIT_ATTRIBUTE)
    return unit


def attach_unit(module: nn.Module, unit: Unit) -> None:
    """Let the module own its unit."""
    module.__dict__[_UNIT_ATTRIBUTE] = unit
