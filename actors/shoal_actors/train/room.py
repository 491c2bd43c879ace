"""Which of its sizes a run takes: the largest that the cluster has room for.

A driver counts places before each attempt. What the attempt before had occupied, or a node that was
lost, is counted right a few seconds later only; so a smaller size than before is taken when the
count has not changed for a while, and a size as large as hoped for at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal_actors.driver import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The places of a cluster, for gangs of some sizes."""

    sizes: Sequence[int]
    """Numbers of workers that the run may have, in rising order."""

    worker: dict[str, float]
    """Resources of each worker."""

    look: Callable[[], Cluster]
    """Gives the cluster as it is now."""

    ask: Callable[[int], None]
    """Is told how many places an autoscaler should bring about; called again and again."""

    on_wait: Callable[[str], None]
    """Is called once where not even the smallest size fits, with what is missing."""

    period_s: float = 0.5
    """Seconds between two counts."""

    settle_s: float = 5.0
    """Seconds for which a count must stay the same before less is made of it."""

    def largest(self, places: int) -> int | None:
        """The largest size of at most ``places`` workers."""
        return max((size for size in self.sizes if size <= places), default=None)

    def free(self) -> int:
        """Workers that would fit beside what runs."""
        return self.look().num_free(self.worker)

    def await_size(self, goal: int) -> int:
        """Wait for room for any size, and take the largest; ``goal`` or more is taken at once.

        There is no deadline: a cluster may get nodes back at any time.
        """
        seen, since, has_told = -1, 0.0, False
        while True:
            self.ask(self.sizes[-1])
            places, now = self.free(), time.monotonic()
            size = self.largest(places)
            if size is not None and size >= goal:
                return size
            if places != seen:
                seen, since = places, now
            if now - since >= self.settle_s:
                if size is not None:
                    return size
                if not has_told:
                    self.on_wait(self._missing(places))
                    has_told = True
            time.sleep(self.period_s)

    def _missing(self, places: int) -> str:
        least = self.sizes[0]
        return (
            f"the run needs {least} workers of {in_words(self.worker)} each, and the cluster has "
            f"{places} such places free"
        )


def in_words(resources: dict[str, float]) -> str:
    """Resources, such as ``2 CPU and 1 GPU``."""
    return " and ".join(f"{amount:g} {name}" for name, amount in resources.items())
