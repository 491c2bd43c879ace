"""The class that a sharded module gets: its own, with the unit's schedule around each call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, SupportsIndex

from torch import nn

from shoal.errors import WorkError
from shoal.fsdp.schedule import Schedule
from shoal.fsdp.unit import Unit, attach_unit, unit_of

_SCHEDULE_ATTRIBUTE = "_shoal_schedule"


class ShardedModule(nn.Module):
    """Mixed in before the class of a module that was sharded; the module stays the same object."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module with its weights in place; an exception leaves the unit at rest."""
        unit, schedule = unit_of(self), schedule_of(self)
        assert unit is not None
        finished = False
        try:
            schedule.before_forward(unit)
            output = super().__call__(*args, **kwargs)
            schedule.after_forward(unit, (args, kwargs), output)
            finished = True
        finally:
            if not finished:
                schedule.abort_forward(unit)
        return output

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As of ``nn.Module``, into this rank's rows; tensors cannot be assigned."""
        if kwargs.get("assign") or len(args) > 2 and args[2]:
            raise WorkError(
                "load_state_dict(assign=True) would replace the sharded parameters: copy into them."
            )
        return super().load_state_dict(*args, **kwargs)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Refuse copies: buffers and hooks belong to this object."""
        raise WorkError("A sharded module cannot be copied or pickled: copy it before sharding.")

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        """As of ``nn.Module``, for buffers; refuses what would move or cast sharded parameters."""
        unit = unit_of(self)
        assert unit is not None
        locals_ = [entry.local for group in unit.groups for entry in group.entries]
        places = [local.data_ptr() for local in locals_]
        for local in locals_:
            probe = fn(local.detach()[:0])
            if (probe.dtype, probe.device) != (local.dtype, local.device):
                raise WorkError(
                    f"A sharded module stays where and what it is: {unit.name} cannot become "
                    f"{probe.dtype} on {probe.device}. Move or cast it before sharding."
                )
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if places != [local.data_ptr() for local in locals_]:
            raise WorkError(f"The sharded parameters of {unit.name} were replaced by copies.")
        return self


def schedule_of(module: nn.Module) -> Schedule:
    """The schedule that drives the unit of a sharded module."""
    schedule: Schedule = module.__dict__[_SCHEDULE_ATTRIBUTE]
    return schedule


def convert(module: nn.Module, unit: Unit, schedule: Schedule) -> None:
    """Make ``module`` a sharded one in place, so that its parents keep the same object."""
    attach_unit(module, unit)
    module.__dict__[_SCHEDULE_ATTRIBUTE] = schedule
    kind = type(module)
    module.__class__ = type(f"Sharded{kind.__name__}", (ShardedModule, kind), {})
