"""Shows what the workers write into the run's folder while they run.

    rank 0 ── metrics.jsonl ──┐
    driver's controller ──────┴─ events.jsonl ──► Follower (a thread of the driver) ──► console

The folder is all that workers and driver share, so this works across nodes, and a step never waits
for whoever looks on.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Self

from rich.console import Console

from shoal.rounds import Rounds
from shoal.training import EventKind, EventReader, MetricsReader, ProgressLine
from shoal_actors.train.failure import in_words

INTERVAL_S = 0.25
"""Seconds between two looks into the folder."""

NOTICE_AFTER_S = 90.0
"""Seconds without workers after which the user is told; a cluster that grows may need minutes."""


class Follower(Rounds):
    """Follows one run on a console for as long as the ``with`` block lasts."""

    def __init__(
        self, folder: Path, console: Console, *, num_steps: int, max_failures: int
    ) -> None:
        super().__init__(self._look, every_s=INTERVAL_S, name="follow-run")
        self._console = console
        self._metrics = MetricsReader(folder)
        self._progress = ProgressLine(console, num_steps=num_steps)
        self._max_failures = max_failures
        self._events = EventReader(folder)
        self._waiting_since: float | None = None
        self._resumed_at = 0

    def __enter__(self) -> Self:
        """Begin with what is written from now on."""
        self._metrics.poll()
        self._events.poll()
        self._waiting_since = time.monotonic()
        self._progress.__enter__()
        return super().__enter__()

    def __exit__(self, *exc: object) -> None:
        """Show the last of it."""
        super().__exit__(*exc)
        self._look()
        self._progress.__exit__(*exc)

    def _look(self) -> None:
        for event in self._events.poll():
            line = self._line(event)
            if line is not None:
                self._print(line)
        if self._waiting_since and time.monotonic() - self._waiting_since > NOTICE_AFTER_S:
            self._print(f"No worker started in {NOTICE_AFTER_S:g} s; the cluster may be full")
            self._waiting_since = None
        for metrics in self._metrics.poll():
            if metrics.step > self._resumed_at:  # what is left of the file is not this command's
                self._progress.show(metrics)

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _line(self, event: dict[str, Any]) -> str | None:
        match event["event"]:
            case EventKind.START:
                self._waiting_since = None
                return f"Training on {len(event['workers'])} workers"
            case EventKind.RESUME:
                self._resumed_at = event["step"]
                return f"Going on from step {event['step']} ({event['path']})"
            case EventKind.SAVE:
                return f"Saved step {event['step']}: {event['num_bytes']:,} bytes"
            case EventKind.SAVE_FAILED:
                again = " It is written once more." if event["is_tried_again"] else ""
                return f"Step {event['step']} was not saved. {event['error']}{again}"
            case EventKind.STRAGGLER:
                return f"Rank {event['rank']} is late: {event['message']}"
            case EventKind.SPOILED:
                return (
                    f"Step {event['step']} was refused: {event['cause']}. Going on from step "
                    f"{event['goes_on_from']} without {event['num_skipped']} sequences"
                )
            case EventKind.FAILURE if not event["is_final"]:  # that is the command's last word
                self._waiting_since = time.monotonic()
                pause_s = event["pause_seconds"]
                pause = f"; the next attempt begins in {pause_s:g} s" if pause_s else ""
                return (
                    f"{in_words(event)} ({event['in_a_row']} in a row; {self._max_failures} are"
                    f" recovered from{pause})"
                )
            case EventKind.NOTICE:
                return f"Told to end: {event['cause']}"
            case EventKind.WAIT:
                self._waiting_since = None
                return f"Waiting for room: {event['missing']}"
            case EventKind.RESIZE:
                change = f"{event['to']} workers instead of {event['from']}"
                return f"Going on as {change}: {event['cause']}"
        return None
