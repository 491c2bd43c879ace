"""Signs of life: each rank writes down, every second, where its training thread is.

A process that was stopped cannot be asked anything. So each tells beforehand: a thread of the rank
looks at the stack of the one that trains and puts it into a file of the run's folder, which
whoever looks for a rank that hangs reads. Nothing compares clocks of two machines: a reader sees
whether the count of the beats goes on.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Self

from shoal.rounds import Rounds
from shoal.training import StepMetrics

PERIOD_S = 1.0
"""Seconds between two beats."""

PULSE_FOLDER = "pulse"
"""Where, among a run's logs, the signs lie."""

WAITING_IN = ("torch.distributed", "shoal.fsdp", "shoal.parallel", "shoal.checkpoint.peers")
"""Modules whose functions send and receive: a rank that stays in one waits for another."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """What one rank tells of itself."""

    rank: int
    """Who."""

    host: str
    """Its machine."""

    pid: int
    """Its process."""

    beat: int
    """Signs so far, this one included."""

    step: int | None
    """The last step that this attempt made; None before the first."""

    is_waiting: bool
    """Whether its training thread is where ranks wait for each other."""

    seconds: float
    """For how long that thread was seen in the same place."""

    place: str
    """The innermost call, in words."""

    stack: str
    """All calls, outermost first, as a traceback shows them."""


class Pulse(Rounds):
    """Gives this process's signs while the ``with`` block lasts; made in the thread that trains."""

    def __init__(self, folder: Path, rank: int) -> None:
        super().__init__(self._give, every_s=PERIOD_S, name="pulse")
        self._path = sign_path(folder, rank)
        self._rank = rank
        self._thread_id = threading.get_ident()
        self._step: int | None = None
        self._seen: tuple[int | None, str] | None = None
        self._since = 0.0
        self._beat = 0

    def __enter__(self) -> Self:
        """Give the first sign, in place of one that an earlier attempt left behind."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._give()
        return super().__enter__()

    def __exit__(self, *exc: object) -> None:
        """Take the last one away: this rank does not hang."""
        super().__exit__(*exc)
        self._path.unlink(missing_ok=True)

    def reached(self, metrics: StepMetrics) -> None:
        """Note a step made."""
        self._step = metrics.step

    def _give(self) -> None:
        try:
            write_sign(self._path, self._look())
        except OSError as error:  # the rank itself is well, and the next beat may get through
            logger.warning("no sign of life could be given: %s", error)

    def _look(self) -> Sign:
        frame = sys._current_frames()[self._thread_id]
        seen = (self._step, "".join(traceback.format_stack(frame)))
        now = time.monotonic()
        if seen != self._seen:
            self._seen, self._since = seen, now
        self._beat += 1
        inner = _innermost(frame)
        return Sign(
            rank=self._rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            beat=self._beat,
            step=self._step,
            is_waiting=_is_waiting(inner),
            seconds=now - self._since,
            place=f"{inner.f_code.co_name} ({inner.f_code.co_filename}:{inner.f_lineno})",
            stack=seen[1],
        )


def sign_path(folder: Path, rank: int) -> Path:
    """The file of a rank's signs; ``folder`` holds the run's logs."""
    return folder / PULSE_FOLDER / f"rank-{rank}.json"


def write_sign(path: Path, sign: Sign) -> None:
    """Put a sign in the place of the one before; a reader sees one of them whole."""
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(asdict(sign)), encoding="utf-8")
    fresh.replace(path)


def read_signs(folder: Path, num_ranks: int) -> dict[int, Sign]:
    """The newest sign of each rank that gives any."""
    signs = {}
    for rank in range(num_ranks):
        try:
            text = sign_path(folder, rank).read_text(encoding="utf-8")
        except OSError:  # there is none, or a network's file system is just replacing it
            continue
        signs[rank] = Sign(**json.loads(text))
    return signs


def _innermost(frame: FrameType) -> FrameType:
    """The frame that says where a thread is: not those of the lock that it waits for."""
    inner: FrameType | None = frame
    while inner is not None and inner.f_globals.get("__name__") == "threading":
        inner = inner.f_back
    return inner or frame


def _is_waiting(frame: FrameType) -> bool:
    module = str(frame.f_globals.get("__name__", ""))
    return any(module == name or module.startswith(f"{name}.") for name in WAITING_IN)
