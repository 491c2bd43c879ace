"""Looks after an engine's loop from a thread beside it: lapsed leases, and steps that hang."""

from __future__ import annotations

import threading
from collections.abc import Callable

from shoal_actors.engine.awake import LOOK_S
from shoal_actors.engine.lease import Leases
from shoal_actors.engine.loop import EngineLoop


class Watchdog:
    """Drops the requests of frontends that have left and calls ``stalled`` once a step hangs."""

    def __init__(
        self,
        loop: EngineLoop,
        leases: Leases,
        *,
        lapsed: Callable[[str], None],
        stalled: Callable[[float], None],
        stall_s: float,
    ) -> None:
        self._loop = loop
        self._leases = leases
        self._lapsed = lapsed
        self._stalled = stalled
        self._stall_s = stall_s
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more."""
        self._is_stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_stopped.wait(LOOK_S):
            for frontend in self._leases.take_lapsed():
                self._loop.drop(frontend)
                self._lapsed(frontend)
            # What the journal holds back has a deadline, which no step may come to notice.
            self._loop.wake()
            busy_s = self._loop.busy_s
            if busy_s > self._stall_s:
                self._stalled(busy_s)
                return
