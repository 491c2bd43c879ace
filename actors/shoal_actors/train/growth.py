"""Stops a gang for more workers, where the cluster has room for them and it is worth it.

To grow costs a start: workers load torch, the model and a checkpoint. So a gang that has not
trained for ``cluster.grow_after_s`` yet goes on as it is, and so does one whose run is over in less
than that.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Self

from shoal.rounds import Rounds
from shoal.training import EventKind, EventReader, MetricsReader, Pace
from shoal_actors.train.room import Room

PERIOD_S = 2.0
"""Seconds between two looks."""


class Growth(Rounds):
    """Looks for room in a thread of the driver, while the ``with`` block around an attempt lasts.

    Room counts when it was there at two looks in a row.
    """

    def __init__(
        self,
        room: Room,
        folder: Path,
        *,
        size: int,
        num_steps: int,
        after_s: float,
        order: Callable[[], None],
    ) -> None:
        """``size`` is the gang's; ``order`` is called once, to stop it; ``folder`` is the run's."""
        super().__init__(lambda: self.look(time.monotonic()), every_s=PERIOD_S, name="growth")
        self.goal: int | None = None
        """The size to go on with, once the gang was told to stop."""
        self._room = room
        self._size = size
        self._after_s = after_s
        self._order = order
        self._metrics = MetricsReader(folder)
        self._metrics.poll()
        self._events = EventReader(folder)
        self._events.poll()
        self._own: Counter[str] = Counter()
        self._began: float | None = None
        self._pace = Pace(num_steps)
        self._seen: int | None = None

    def __enter__(self) -> Self:
        """Begin to look."""
        self._room.ask(self._missing)
        return super().__enter__()

    def look(self, now: float) -> None:
        """Judge how things are at ``now``, in seconds of any clock that goes on."""
        if not self._missing:
            return
        self._room.ask(self._missing)
        for step in self._metrics.poll():
            self._began = now if self._began is None else self._began
            self._pace.count(step)
        left_s = self._pace.left_s
        if left_s is None or self._began is None:
            return
        if now - self._began < self._after_s or left_s < self._after_s:
            return
        for event in self._events.poll():
            if event["event"] == EventKind.START:
                self._own = Counter(worker["node"] for worker in event["workers"])
        size = self._room.largest(self._room.places(self._own))
        if size is not None and size > self._size and size == self._seen:
            self.goal = size
            self._order()
            self.stop()
        self._seen = size

    @property
    def _missing(self) -> int:
        """Workers that the gang has not got."""
        return self._room.sizes[-1] - self._size
