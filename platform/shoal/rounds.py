"""What is done every so many seconds beside the work, in a thread: a sign given, a look taken."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Self


class Rounds:
    """Makes rounds in a thread of its own while the ``with`` block lasts."""

    def __init__(self, visit: Callable[[], object], *, every_s: float, name: str) -> None:
        """``visit`` is called every ``every_s`` seconds, the first time after as many.

        What it raises ends the thread, which is called ``name``.
        """
        self._visit = visit
        self._every_s = every_s
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __enter__(self) -> Self:
        """Begin."""
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        """End."""
        self.stop()

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Make no more rounds; waits for one that is being made, unless a visit itself calls."""
        self._is_over.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(self._every_s):
            self._visit()
