"""Looks after an engine's loop from a thread beside it: lapsed leases, and steps that hang."""

from __future__ import annotations

from collections.abc import Callable

from shoal.rounds import Rounds
from shoal_actors.engine.awake import LOOK_S
from shoal_actors.engine.lease import Leases
from shoal_actors.engine.loop import EngineLoop


class Watchdog(Rounds):
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
        super().__init__(self._look, every_s=LOOK_S, name="watchdog")
        self._loop = loop
        self._leases = leases
        self._lapsed = lapsed
        self._stalled = stalled
        self._stall_s = stall_s

    def _look(self) -> None:
        for frontend in self._leases.take_lapsed():
            self._loop.drop(frontend)
            self._lapsed(frontend)
        # What the journal holds back has a deadline, which no step may come to notice.
        self._loop.wake()
        busy_s = self._loop.busy_s
        if busy_s > self._stall_s:
            self.stop()
            self._stalled(busy_s)
