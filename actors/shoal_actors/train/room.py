"""Which of its sizes a run takes: the largest that the cluster has room for.

A driver counts places before each attempt. What the attempt before had occupied, or a node that was
lost, is counted right a few seconds later only; so a smaller size than before is taken when the
count has not changed for a while, and a size as large as hoped for at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from shoal_actors.driver import Cluster
from shoal_actors.train.domains import keeps_domains
from shoal_actors.train.setbacks import Setbacks


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The places of a cluster, for gangs of some sizes."""

    sizes: Sequence[int]
    """Numbers of workers that the run may have, in rising order."""

    worker: dict[str, float]
    """Resources of each worker."""

    domain: int | None
    """Ranks that are to share fast links, where not all of them are."""

    look: Callable[[], Cluster]
    """Gives the cluster as it is now."""

    ask: Callable[[int], None]
    """Is told how many places an autoscaler should bring about; called again and again."""

    on_wait: Callable[[str], None]
    """Is called once where not even the smallest size fits, with what is missing."""

    setbacks: Setbacks = field(default_factory=Setbacks)
    """Sizes that are not to be taken for a while, though there are places."""

    period_s: float = 0.5
    """Seconds between two counts."""

    settle_s: float = 5.0
    """Seconds for which a count must stay the same before less is made of it."""

    def largest(self, places: Sequence[int]) -> int | None:
        """The largest size that fills ``places`` of each node without tearing a domain."""
        now = time.monotonic()
        fitting = (
            size for size in reversed(self.sizes) if self.setbacks.against(size, now) is None
        )
        return next((size for size in fitting if self._fits(size, places)), None)

    def places(self, own: Mapping[str, int]) -> tuple[int, ...]:
        """Workers that would fit into each node beside what runs, but for the run's ``own``.

        These are so many on each node, by its id.
        """
        return self.look().free_places(self.worker, own)

    def put_off(self, size: int, problem: str) -> None:
        """Take a size not again for a while: its workers got machines that do not do."""
        self.setbacks.count(size, problem, time.monotonic())

    def await_size(self, goal: int) -> int:
        """Wait for room for any size, and take the largest; ``goal`` or more is taken at once.

        There is no deadline: a cluster may get nodes back at any time.
        """
        seen: Sequence[int] | None = None
        since, has_told = 0.0, False
        while True:
            self.ask(self.sizes[-1])
            places, now = self.places({}), time.monotonic()
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

    def _fits(self, size: int, places: Sequence[int]) -> bool:
        return size <= sum(places) and keeps_domains(places, size, self.domain)

    def _missing(self, places: Sequence[int]) -> str:
        now = time.monotonic()
        for size in self.sizes:
            problem = self.setbacks.against(size, now)
            if problem is not None and self._fits(size, places):
                return f"with {size} workers, {problem}"
        missing = (
            f"the run needs {self.sizes[0]} workers of {in_words(self.worker)} each, and the "
            f"cluster has {sum(places)} such places free"
        )
        if self.sizes[0] <= sum(places):
            nodes = ", ".join(map(str, places))
            missing += f", on nodes of {nodes}, which do not keep domains of {self.domain} together"
        return missing


def in_words(resources: dict[str, float]) -> str:
    """Resources, such as ``2 CPU and 1 GPU``."""
    return " and ".join(f"{amount:g} {name}" for name, amount in resources.items())
