"""A rank's hold of the process that writes for it."""

from __future__ import annotations

import importlib.util
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from shoal.storage.job import Abandon, Outcome, WriteJob

logger = logging.getLogger(__name__)

_NEEDED = ("shoal", "xxhash", "pyarrow")
"""What it imports beside Python itself; the last only for a store."""

END_S = 5.0
"""Seconds for the process to end by itself once it is told to."""


class WriterProcess:
    """One such process, from ``start`` to ``close``."""

    def __init__(self, process: subprocess.Popen[bytes], connection: socket.socket) -> None:
        """``connection`` leads to the process; it is this object's from now on."""
        self._process = process
        self._socket = connection
        self._connection = Connection(os.dup(connection.fileno()))
        self._sending = threading.Lock()
        self._is_killed = False
        self._has_hung_up = False

    @classmethod
    def start(cls, descriptors: Sequence[int]) -> WriterProcess:
        """Start one that may read the shared memory behind ``descriptors``."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                # Without the packages of the environment, which take time to look through.
                [sys.executable, "-S", "-m", "shoal.storage.writer", str(theirs.fileno())],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(_places())},
                pass_fds=(theirs.fileno(), *descriptors),
                stdin=subprocess.DEVNULL,
            )
        return cls(process, ours)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def has_hung_up(self) -> bool:
        """Whether ``receive`` has found it gone; its jobs will get no outcome."""
        return self._has_hung_up

    @property
    def is_gone(self) -> bool:
        """Whether it has ended. No signal ends it while it waits for a disk that hangs."""
        return self._process.poll() is not None

    @property
    def last_word(self) -> str:
        """How it ended, once it is closed."""
        code = self._process.poll()
        if code is None:
            return "the process that writes for this rank does not end: its disk hangs"
        ending = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        return f"the process that writes for this rank ended {ending}"

    def send(self, job: WriteJob) -> None:
        """Hand a job over, from any thread; waits while the process is busy with another.

        ``receive`` says where the process is gone, after all that it had to tell.
        """
        try:
            with self._sending:
                self._connection.send(job)
        except OSError:
            pass  # it is gone

    def abandon(self, token: str, timeout_s: float) -> bool:
        """Tell it to give a save up; whether it will hear of that before it begins another job."""
        deadline = time.monotonic() + timeout_s
        if not self._sending.acquire(timeout=timeout_s):
            return False
        try:
            listening = select.poll()
            listening.register(self._socket, select.POLLOUT)
            if not listening.poll(1000 * max(deadline - time.monotonic(), 0.0)):
                return False
            self._connection.send(Abandon(token=token))
        except OSError:
            return False  # it is gone
        finally:
            self._sending.release()
        return True

    def receive(self, timeout_s: float) -> Outcome | None:
        """The next outcome, if one comes in time."""
        if self._has_hung_up:
            return None
        try:
            if not self._connection.poll(timeout_s):
                return None
            outcome: Outcome = self._connection.recv()
        except (EOFError, OSError):
            self._has_hung_up = True
            return None
        return outcome

    def kill(self) -> None:
        """End it at once, or as soon as the disk lets it."""
        self._is_killed = True
        self._process.kill()
        self._hang_up()

    def close(self) -> None:
        """End it, whatever it is doing. One that no signal ends is left behind, and said so."""
        self._hang_up()
        if not self._is_killed and not self._ends():
            self.kill()
        if not self._ends():
            logger.warning("Process %d does not end: its disk hangs. It is left behind.", self.pid)
        with self._sending:
            self._connection.close()
            self._socket.close()

    def _hang_up(self) -> None:
        """Have it and whoever waits to send to it find the other end gone."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it was so before

    def _ends(self) -> bool:
        """Give it time."""
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            return False
        return True


def _places() -> list[str]:
    """Where these packages are found."""
    specs = [importlib.util.find_spec(name) for name in _NEEDED]
    origins = [Path(spec.origin) for spec in specs if spec is not None and spec.origin is not None]
    return list(dict.fromkeys(str(origin.parents[1]) for origin in origins))
