"""Time that leaves out while this process itself stood still, stopped or swapped out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

LOOK_S = 0.25
"""How often whoever counts on the time has to look at it, so that none is left out."""
_MOST_S = 4 * LOOK_S


class AwakeClock:
    """Seconds, of which no more than one pass between two looks. Any thread may look.

    Who stands still hears nobody, and finds everyone silent for as long when it goes on; what it
    was computing has taken no longer for it. Both are measured by this clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._now = 0.0
        self._looked = clock()
        self._lock = threading.Lock()

    def __call__(self) -> float:
        """The time."""
        with self._lock:
            now = self._clock()
            self._now += min(now - self._looked, _MOST_S)
            self._looked = now
            return self._now
