"""Nodes that are to leave the cluster while a run trains on them.

    an evicted pod's ``ray start``, ``ray drain-node``, an autoscaler ──► Ray's head: node N drains
    driver   asks the head, once a second ─ ranks on N? ──► tells the ranks to save and to end

Ray puts no new workers on such a node, and lets those that run stay until it is gone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ray.exceptions import RayError

from shoal.rounds import Rounds
from shoal.training import EventKind, EventReader

PERIOD_S = 1.0
"""Seconds between two questions."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """A node's notice."""

    node: str
    """Its id in Ray."""

    ranks: tuple[int, ...]
    """Ranks of the run on it."""

    is_drivers: bool
    """Whether the run's driver is on it, and ends with it."""

    left_s: float | None
    """Seconds until it is gone, where that was said."""

    def __str__(self) -> str:
        """What is shown to the user."""
        who = "of the driver" if self.is_drivers else f"of ranks {', '.join(map(str, self.ranks))}"
        when = "" if self.left_s is None else f" in {self.left_s:.0f} s"
        return f"node {self.node[:12]} {who} is to leave the cluster{when}"


class LeavingWatch(Rounds):
    """Asks in a thread of the driver, while the ``with`` block around an attempt lasts."""

    def __init__(
        self,
        folder: Path,
        *,
        own: str,
        ask: Callable[[], Mapping[str, int]],
        on_departure: Callable[[Departure], None],
    ) -> None:
        """``own`` is the driver's node, ``folder`` the run's.

        ``ask`` gives the nodes that are to leave, each with the time when it is gone, in
        milliseconds since 1970, or 0 where none was said. ``on_departure`` is called once, with the
        first that matters.
        """
        super().__init__(self._poll, every_s=PERIOD_S, name="leaving-watch")
        self.departure: Departure | None = None
        """What was told."""
        self._own = own
        self._ask = ask
        self._on_departure = on_departure
        self._events = EventReader(folder)
        self._events.poll()  # those of earlier attempts
        self._ranks: dict[str, list[int]] = {}

    def _poll(self) -> None:
        try:
            leaving = self._ask()
        except RayError as error:  # the head is away for a moment
            logger.warning("could not ask which nodes are to leave: %s", error)
            return
        self.look(leaving, time.time())
        if self.departure is not None:
            self.stop()

    def look(self, leaving: Mapping[str, int], now: float) -> None:
        """Judge the nodes that ``ask`` gave at ``now``, in seconds since 1970."""
        for event in self._events.poll():
            if event["event"] == EventKind.START:
                self._ranks = {}
                for worker in event["workers"]:
                    self._ranks.setdefault(worker["node"], []).append(worker["rank"])
        for node in sorted(leaving, key=lambda node: node != self._own):
            if self.departure is None and (node == self._own or node in self._ranks):
                deadline = leaving[node]
                self.departure = Departure(
                    node=node,
                    ranks=tuple(self._ranks.get(node, ())),
                    is_drivers=node == self._own,
                    left_s=max(deadline / 1000 - now, 0.0) if deadline else None,
                )
                self._on_departure(self.departure)
