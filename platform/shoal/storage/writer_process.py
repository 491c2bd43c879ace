"""A rank's hold of the process that writes for it."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from shoal.storage.job import Abandon, Outcome, WriteJob

_NEEDED = ("shoal", "xxhash", "pyarrow")
"""What it imports beside Python itself; the last only for a store."""

END_S = 5.0
"""Seconds for the process to end by itself once it is told to."""


class WriterProcess:
    """One such process, from ``start`` to ``close``."""

    def __init__(self, process: subprocess.Popen[bytes], connection: Connection) -> None:
        self._process = process
        self._connection = connection
        self._sending = threading.Lock()
        self._ended = False

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
        return cls(process, Connection(ours.detach()))

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether it has been found dead; its jobs will get no outcome."""
        return self._ended

    @property
    def last_word(self) -> str:
        """How it ended, once ``has_ended``."""
        code = self._process.wait(END_S)
        ending = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        return f"the process that writes for this rank ended {ending}"

    def send(self, message: WriteJob | Abandon) -> None:
        """Hand a message over, from any thread; a ``receive`` says where the process is gone."""
        try:
            with self._sending:
                self._connection.send(message)
        except OSError:
            self._ended = True

    def receive(self, timeout_s: float) -> Outcome | None:
        """The next outcome, if one comes in time."""
        if self._ended:
            return None
        try:
            if not self._connection.poll(timeout_s):
                return None
            outcome: Outcome = self._connection.recv()
        except (EOFError, OSError):
            self._ended = True
            return None
        return outcome

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._ended = True

    def close(self) -> None:
        """End it, whatever it is doing."""
        self._connection.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(END_S)


def _places() -> list[str]:
    """Where these packages are found."""
    specs = [importlib.util.find_spec(name) for name in _NEEDED]
    origins = [Path(spec.origin) for spec in specs if spec is not None and spec.origin is not None]
    return list(dict.fromkeys(str(origin.parents[1]) for origin in origins))
