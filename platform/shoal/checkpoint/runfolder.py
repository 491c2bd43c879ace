"""A run's folder, and the lock by which one run at a time writes into it.

The lock is ``flock`` on ``run.lock``, which the system gives back however its holder ends, so that
on one host (and on shared file systems that carry ``flock`` across hosts, such as NFS version 4) a
lock that can be taken is free. Where ``flock`` does not reach other hosts, the heartbeat decides:
the holder touches the file every few seconds, and another host may take over once it is older than
``STALE_S`` by the file system's own clock. The file says who holds the lock; a holder that ends in
order empties it. The process that drives a run holds the lock, its ranks do not ask for it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path

from shoal.errors import ConfigError, WorkError

logger = logging.getLogger(__name__)

LOCK_NAME = "run.lock"
HEARTBEAT_S = 5.0
"""Seconds between two signs of life of the holder."""

STALE_S = 30.0
"""Seconds without a sign of life after which another host may take over."""

_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


class _Flock(Enum):
    """What the system said when asked for the lock."""

    TAKEN = "taken"
    HELD = "held by another"
    UNKNOWN = "this file system has no locks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Who holds a run's folder."""

    host: str
    """Name of the host."""

    pid: int
    """Process on that host."""

    started: str
    """When the lock was taken, UTC."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The folder of one run, ``run.dir/run.name``."""

    path: Path
    """Where it is."""

    @property
    def checkpoints(self) -> Path:
        """Folder of the run's checkpoints."""
        return self.path / "checkpoints"

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Make the folder if there is none, and keep other runs out of it.

        Raises ConfigError on ``run.name`` where another run holds it, and WorkError where the
        folder cannot be made or written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            try:
                self._take(descriptor)
            except OSError as error:
                raise self._unwritable(error) from error
            try:
                with _heartbeat(descriptor):
                    yield
            finally:
                os.ftruncate(descriptor, 0)
        finally:
            os.close(descriptor)

    def _take(self, descriptor: int) -> None:
        flock = _flock(descriptor)
        owner = _owner(descriptor)
        out_of_reach = owner is not None and (
            flock is _Flock.UNKNOWN or owner.host != socket.gethostname()
        )
        if flock is _Flock.HELD or (out_of_reach and self._age_s(descriptor) < STALE_S):
            raise self._in_use(owner)
        if owner is not None:
            logger.warning(
                "%s is taken over from %s, which ended without a word.", self.path, owner
            )
        record = Owner(
            host=socket.gethostname(),
            pid=os.getpid(),
            started=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(asdict(record)).encode(), 0)

    def _age_s(self, descriptor: int) -> float:
        """Seconds since the last sign of life, by the clock that stamps both files."""
        with tempfile.NamedTemporaryFile(dir=self.path, prefix=".run.lock.") as now:
            return os.fstat(now.fileno()).st_mtime - os.fstat(descriptor).st_mtime

    def _unwritable(self, error: OSError) -> WorkError:
        return WorkError(f"{self.path} cannot be written: {error.strerror}.")

    def _in_use(self, owner: Owner | None) -> ConfigError:
        holder = "another run"
        if owner is not None:
            holder = f"process {owner.pid} on {owner.host} since {owner.started}"
        return ConfigError(
            "run.name",
            self.path.name,
            f"the run's folder {self.path} is in use by {holder}",
            "Choose another name, or wait for that run to end",
        )


def _flock(descriptor: int) -> _Flock:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return _Flock.HELD
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
        logger.warning("%s: %s; only signs of life guard the folder.", LOCK_NAME, error.strerror)
        return _Flock.UNKNOWN
    return _Flock.TAKEN


def _owner(descriptor: int) -> Owner | None:
    """Who wrote the lock last and did not empty it; none where it holds nothing readable."""
    text = os.pread(descriptor, 4096, 0)
    try:
        return Owner(**json.loads(text)) if text else None
    except (ValueError, TypeError):
        return None


@contextmanager
def _heartbeat(descriptor: int) -> Iterator[None]:
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(HEARTBEAT_S):
            try:
                os.utime(descriptor)
            except OSError as error:
                logger.warning("%s: no sign of life could be given: %s", LOCK_NAME, error)

    thread = threading.Thread(target=beat, name="run-lock-heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
