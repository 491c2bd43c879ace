"""Who holds a run's folder, and the signs of life by which others know that it still does."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from shoal.errors import ConfigError, WorkError
from shoal.rounds import Rounds
from shoal.storage.location import Location

logger = logging.getLogger(__name__)

LOCK_NAME = "run.lock"
"""The file in a run's folder that says who holds it."""

HEARTBEAT_S = 5.0
"""Seconds between two signs of life of the holder."""

STALE_S = 30.0
"""Seconds without a sign of life after which another host may take over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Who holds a run's folder."""

    host: str
    """Name of the host."""

    pid: int
    """Process on that host."""

    started: str
    """When the lock was taken, UTC."""

    @classmethod
    def here(cls) -> Owner:
        """This process, from now on."""
        return cls(
            host=socket.gethostname(),
            pid=os.getpid(),
            started=datetime.now(UTC).isoformat(timespec="milliseconds"),
        )

    @classmethod
    def of(cls, data: bytes) -> Owner | None:
        """Who wrote a lock last; none where it holds nothing readable."""
        try:
            return cls(**json.loads(data)) if data else None
        except (ValueError, TypeError):
            return None

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.started}"

    @property
    def record(self) -> bytes:
        """What stands in the lock."""
        return json.dumps(asdict(self)).encode()

    @property
    def is_here(self) -> bool:
        """Whether it is of this host, where processes can be asked."""
        return self.host == socket.gethostname()

    @property
    def is_alive_here(self) -> bool:
        """Whether its process runs on this host."""
        if not self.is_here:
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # another user's
        return True


def in_use(folder: Location, owner: Owner | None) -> ConfigError:
    """What to raise where another run holds the folder."""
    holder = "another run" if owner is None else owner
    return ConfigError(
        "run.name",
        folder.name,
        f"the run's folder {folder} is in use by {holder}",
        "Choose another name, or wait for that run to end",
    )


@contextmanager
def holding(
    folder: Location, own: Owner, *, owner: Callable[[], Owner | None], sign: Callable[[], object]
) -> Iterator[None]:
    """Give signs of life by ``sign`` every few seconds, while ``owner`` says that it is ``own``.

    Another run takes over from a process that was stopped for ``STALE_S`` and goes on then. That
    one, which would write beside the other, is told by SIGTERM, if it handles that, and its block
    raises WorkError in the place of anything else. ``owner`` and ``sign`` may raise ``OSError``.
    """
    successors: list[Owner] = []

    def beat() -> None:
        try:
            found = owner()
            if found in (own, None):
                sign()
            elif not successors:
                successors.append(found)
                _end_this_process()
        except OSError as error:
            logger.warning("%s: no sign of life could be given: %s", LOCK_NAME, error)

    try:
        with Rounds(beat, every_s=HEARTBEAT_S, name="run-lock-heartbeat"):
            yield
    finally:
        if successors:
            raise WorkError(
                f"{folder} was taken over by {successors[0]}, to whom this process had given no "
                f"sign of life for {STALE_S:.0f} seconds. That run goes on, and this one ends."
            )


def _end_this_process() -> None:
    if callable(signal.getsignal(signal.SIGTERM)):
        os.kill(os.getpid(), signal.SIGTERM)
