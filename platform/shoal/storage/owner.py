"""Who holds a run's folder, and the signs of life by which others know that it still does."""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from shoal.errors import ConfigError
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


def signs_of_life(beat: Callable[[], None]) -> Rounds:
    """Calls ``beat``, which may raise ``OSError``, every few seconds while its block lasts."""

    def try_to() -> None:
        try:
            beat()
        except OSError as error:
            logger.warning("%s: no sign of life could be given: %s", LOCK_NAME, error)

    return Rounds(try_to, every_s=HEARTBEAT_S, name="run-lock-heartbeat")
