"""Leases: a frontend that is not heard of for a while has left, and its requests with it."""

from __future__ import annotations

import threading
from collections.abc import Callable

LEASE_S = 5.0
"""Silence after which a frontend has left."""


class Leases:
    """Who was heard of when. Any thread may call any method."""

    def __init__(self, clock: Callable[[], float], lease_s: float = LEASE_S) -> None:
        self._clock = clock
        self._lease_s = lease_s
        self._heard: dict[str, float] = {}
        self._lock = threading.Lock()

    def grant(self, frontend: str) -> None:
        """Begin the lease of ``frontend``."""
        with self._lock:
            self._heard[frontend] = self._clock()

    def renew(self, frontend: str) -> bool:
        """Note that ``frontend`` lives; False where it has no lease, or has it no more."""
        with self._lock:
            if frontend not in self._heard:
                return False
            self._heard[frontend] = self._clock()
            return True

    def holds(self, frontend: str) -> bool:
        """Whether ``frontend`` has a lease."""
        with self._lock:
            return frontend in self._heard

    def end(self, frontend: str) -> None:
        """End the lease of ``frontend``, if it has one."""
        with self._lock:
            self._heard.pop(frontend, None)

    def take_lapsed(self) -> list[str]:
        """End the leases that were not renewed in time, and tell whose they were."""
        latest = self._clock() - self._lease_s
        with self._lock:
            lapsed = [frontend for frontend, heard in self._heard.items() if heard < latest]
            for frontend in lapsed:
                del self._heard[frontend]
        return lapsed
