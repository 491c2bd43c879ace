"""``events.jsonl``: what happened to a run besides its steps."""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from shoal.training.lines import LineReader, append_line, open_lines, records, writing

EVENTS_FILE = "events.jsonl"


class EventKind(StrEnum):
    """What a line of ``events.jsonl`` tells."""

    START = "start"
    """Ranks begin an attempt."""
    RESUME = "resume"
    """An attempt goes on from a checkpoint."""
    SAVE = "save"
    """A checkpoint is complete."""
    SAVE_FAILED = "save_failed"
    """A checkpoint did not become complete."""
    STRAGGLER = "straggler"
    """Ranks wait for one that does not come."""
    SPOILED = "spoiled"
    """A step was refused, and other data is read instead."""
    NOTICE = "notice"
    """Ranks are told to make one more step, to save it and to end."""
    WAIT = "wait"
    """The cluster has no room for the fewest workers; the run waits."""
    RESIZE = "resize"
    """The run goes on as another number of workers."""
    FAILURE = "failure"
    """An attempt failed."""
    REFUSAL = "refusal"
    """A run was refused before it began."""
    END = "end"
    """The run is over."""


def append_event(folder: Path, kind: EventKind, /, **fields: Any) -> None:
    """Append one event with the time (UTC) and ``fields`` (JSON values).

    Lines of several processes of one machine do not mix. Raises WorkError where the folder cannot
    be written.
    """
    event = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": kind, **fields}
    path = folder / EVENTS_FILE
    with writing(path), open_lines(path) as file:
        append_line(file, event)


class EventReader:
    """Follows the ``events.jsonl`` of a run's folder; there need not be one yet."""

    def __init__(self, folder: Path) -> None:
        self._reader = LineReader(folder / EVENTS_FILE)

    def poll(self) -> list[dict[str, Any]]:
        """Events since the last call, oldest first; at the first call all of them."""
        return list(records(self._reader.poll().lines))
