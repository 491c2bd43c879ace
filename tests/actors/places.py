"""A cluster without Ray: places that come and go as a test says."""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal_actors.driver import Cluster
from shoal_actors.train.room import Room
from shoal_actors.train.setbacks import Setbacks

WORKER = {"CPU": 1.0}


def cluster_of(*places: int) -> Cluster:
    """One with so many free places on each of its nodes, ``a``, ``b`` and so on."""
    nodes = tuple({"CPU": float(count)} for count in places)
    free = {chr(ord("a") + index): node for index, node in enumerate(nodes)}
    return Cluster(is_own=False, nodes=nodes, free=free, limit=None)


@dataclass
class Places:
    """A cluster whose free places are as scripted, one entry a look; the last one stays."""

    script: list[int | tuple[int, ...]]
    """Places of the one node, or of each node."""
    asked: list[int] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    delay_s: float = 3600.0
    """Seconds for which a size is put off for the first time."""

    def look(self) -> Cluster:
        places = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        return cluster_of(*((places,) if isinstance(places, int) else places))

    def wait(self, missing: str) -> None:
        """A node comes, now that the run waits for it."""
        self.missing.append(missing)
        self.script = [2]

    def room(self, *sizes: int, domain: int | None = None) -> Room:
        return Room(
            sizes=sizes,
            worker=WORKER,
            domain=domain,
            look=self.look,
            ask=self.asked.append,
            on_wait=self.wait,
            setbacks=Setbacks(first_delay_s=self.delay_s),
            period_s=0.02,
            settle_s=0.1,
        )
