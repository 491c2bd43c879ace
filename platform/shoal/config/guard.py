"""What happens to a step that would spoil the weights."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from shoal.config.section import Section, in_vain, refuse


class GuardSettings(Section):
    """``train.guard``: loss and gradient are looked at before any weight changes."""

    action: Literal["stop", "skip", "rollback"] = "stop"
    """End the run (``stop``), make the step with the next batch instead (``skip``), or go back to
    the newest checkpoint and go on without the batches read since (``rollback``)."""

    spike_factor: float | None = Field(default=None, gt=1)
    """A loss above this many times the mean of the last ``window`` ones counts like one that is not
    finite; unset: any finite loss is good."""

    window: int = Field(default=20, ge=1, le=10_000)
    """Losses that a spike is measured against; until that many are known, no loss counts as
    one."""

    limit: int = Field(default=3, ge=1)
    """Batches skipped in a row, or returns to one checkpoint, after which the run ends."""

    @model_validator(mode="after")
    def _limits_what_it_does(self) -> GuardSettings:
        found = []
        if self.spike_factor is None:
            problem = "without a spike_factor no loss is measured against others"
            remedy = "Leave it out, or set train.guard.spike_factor"
            found += in_vain(self, ("window",), problem, remedy)
        if self.action == "stop":
            problem = "the first step that is refused ends the run"
            remedy = "Leave it out, or set train.guard.action to skip or rollback"
            found += in_vain(self, ("limit",), problem, remedy)
        refuse(found)
        return self
