"""When and where a run's state is saved."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from shoal.config.section import Section, refuse
from shoal.errors import ConfigError
from shoal.storage import location_of_store

RESUME_WORDS = ("auto", "never")
"""Values of ``checkpoint.resume`` that are no path."""


class CheckpointSettings(Section):
    """``checkpoint``: interval, retention, resumption, and what a save may cost."""

    every: int | None = Field(default=None, ge=1)
    """Steps between checkpoints; unset saves at the end only."""

    keep: int | None = Field(default=2, ge=1)
    """Newest complete checkpoints to keep; null keeps all."""

    storage: str | None = Field(default=None, min_length=1)
    """Where checkpoints go instead of the run's folder: a URI, below which each run has a folder of
    its name, such as ``s3://bucket/prefix``, ``gs://bucket/prefix`` or ``file:///mnt/shared``.
    Credentials come from the environment of every node."""

    resume: str = Field(default="auto", min_length=1)
    """``auto`` goes on from the run's newest complete checkpoint, ``never`` refuses a folder that
    has one, a path or URI starts from that checkpoint."""

    asynchronous: bool = True
    """Copy the state aside, with room for two saves, and write from there while the run goes on;
    false writes while the run waits, without memory for copies."""

    on_failure: Literal["stop", "retry", "warn"] = "stop"
    """A failed save ends the run by the next save at the latest (``stop``), or only if writing the
    same state once more fails as well or a rank has no copy of it (``retry``), or it costs no more
    than that step (``warn``)."""

    allow: tuple[str, ...] = ()
    """Keys that the checkpoint may hold although nothing reads them, or may lack although something
    does: names such as ``model.lm_head.weight`` or ``optimizer.lm_head.*``, where ``*`` stands for
    any text. What is missing starts as in a new run."""

    @field_validator("storage")
    @classmethod
    def _check_storage(cls, value: str | None) -> str | None:
        """Refuse what names no place; whether it can be used shows when the run starts."""
        if value is not None:
            try:
                location_of_store(value, "")
            except ConfigError as error:
                refuse([error])
        return value
