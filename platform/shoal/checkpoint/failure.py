"""What becomes of a run when a save fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from shoal.storage import Location


class OnFailure(StrEnum):
    """``checkpoint.on_failure``."""

    STOP = "stop"
    """The run ends, with the cause."""

    RETRY = "retry"
    """The same state is written once more from the ranks' copies of it; if that fails as well, or a
    rank has no copy, the run ends."""

    WARN = "warn"
    """The run goes on without that step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """How a save came out, for the record."""

    step: int
    """Steps taken when it was saved."""

    path: Location | None = None
    """Folder of the step; unset where it failed."""

    num_bytes: int = 0
    """Bytes that all ranks write."""

    seconds: float = 0.0
    """From its beginning until it was published or had failed."""

    stall_s: float = 0.0
    """Of these, how long the first rank's loop waited."""

    waited_s: float = 0.0
    """Of these again, how long for earlier saves to end, because all staging memory was taken."""

    error: str | None = None
    """Why it failed; unset if it did not."""

    is_tried_again: bool = False
    """Whether the same state is written once more."""


Note = Callable[[SaveReport], None]
"""Takes reports, on the first rank alone."""
