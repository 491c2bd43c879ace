"""``events.jsonl``: what happened to a run besides its steps."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from shoal.errors import WorkError
from shoal.training.lines import LineReader

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

    Written by one ``write`` of a file opened for appending, so lines of several processes of one
    machine do not mix. Raises WorkError where the folder cannot be written.
    """
    event = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": kind, **fields}
    try:
        with (folder / EVENTS_FILE).open("ab", buffering=0) as file:
            file.write(json.dumps(event).encode() + b"\n")
    except OSError as error:
        raise WorkError(f"cannot write {folder / EVENTS_FILE}: {error.strerror}.") from error


class EventReader:
    """Follows the ``events.jsonl`` of a run's folder; there need not be one yet."""

    def __init__(self, folder: Path) -> None:
        self._reader = LineReader(folder / EVENTS_FILE)

    def poll(self) -> list[dict[str, Any]]:
        """Events since the last call, oldest first; at the first call all of them."""
        return [json.loads(line) for line in self._reader.poll().lines]
