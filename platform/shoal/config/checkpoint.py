"""When and where a run's state is saved."""

from __future__ import annotations

from pydantic import Field

from shoal.config.section import Section


class CheckpointSettings(Section):
    """``checkpoint``: interval, retention and resumption."""

    every: int | None = Field(default=None, ge=1)
    """Steps between checkpoints; unset saves at the end only."""

    keep: int | None = Field(default=2, ge=1)
    """Newest complete checkpoints to keep; null keeps all."""

    resume: str = Field(default="auto", min_length=1)
    """``auto`` goes on from the run's newest complete checkpoint, ``never`` refuses a folder that
    has one, a path starts from that checkpoint."""
