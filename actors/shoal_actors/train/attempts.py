"""Makes attempts of a run until one comes to its end; says how large each is, and what is the last.

    room for a size? ──► attempt: a gang of that size, from the newest checkpoint
          ▲                  ├─ failed ──► once too often? yes ──► the run has failed
          ├──── pause ◄──────│───────────────── no
          ├──────────────────┤ its machines do not do: the size has no room now
          ├──────────────────┤ stopped after a saved step: there is room for more workers, a
          │                  │    node of theirs is to leave, or one was told to end
          │                  └─ ended ──► the run's result

A size that changes, a failure, a notice and a wait are events of the run's folder, which the user
is shown. What fails on a node that was to leave is no failure of the run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from shoal.config import Config
from shoal.errors import EndedEarly, Misplaced, WorkError
from shoal.training import EventKind, EventReader, MetricsReader, TrainResult
from shoal_actors.train.budget import Budget
from shoal_actors.train.cut import Cut
from shoal_actors.train.failure import AttemptFailed, last_word
from shoal_actors.train.gang import NoRoom
from shoal_actors.train.growth import Growth
from shoal_actors.train.leaving import Departure, LeavingWatch
from shoal_actors.train.note import note
from shoal_actors.train.room import Room
from shoal_actors.train.worker import LOGS_FOLDER

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempts:
    """What the attempts of a run are made of."""

    config: Config
    """The run as configured."""

    folder: Path
    """The run's folder, where events are noted and metrics read."""

    attempt: Callable[[int, Cut], TrainResult]
    """Makes one with some number of workers, who end early where they are told to; raises
    AttemptFailed and NoRoom."""

    room: Room
    """Where their number comes from."""

    leaving: Callable[..., LeavingWatch]
    """Makes what looks for nodes that are to leave, given its ``on_departure``."""

    introduce: Callable[[int], None]
    """Shows the plan of a number of workers that the run goes on as."""

    pause: Callable[[float], None] = time.sleep
    """Waits for so many seconds."""

    def run(self) -> TrainResult:
        """The result of the last attempt.

        Raises WorkError with the first cause where the run is given up, ConfigError where a worker
        refused the user's input, and EndedEarly where the driver's own node is to leave. What the
        machines of a moment do not do for is the user's input only where nothing was trained yet,
        and at the size that was asked for.
        """
        budget, events = Budget(self.config.cluster.max_failures), EventReader(self.folder)
        steps = MetricsReader(self.folder)
        for earlier in (events, steps):
            earlier.poll()  # what earlier commands wrote
        size, goal, cause = None, self.room.sizes[-1], ""
        has_trained = False
        while True:
            before, size = size, self.room.await_size(goal)
            if size != before:
                if before is not None:
                    change = {"from": before, "to": size, "cause": cause}
                    note(self.folder, EventKind.RESIZE, **change)
                self.introduce(size)
            goal, cause = size, "the cluster has no room for more"
            cut = Cut()
            growth = self._growth(size, cut)
            leaving = self.leaving(on_departure=partial(self._depart, cut))
            try:
                with growth, leaving:
                    result = self.attempt(size, cut)
            except NoRoom as error:
                logger.warning("%s", error)
            except AttemptFailed as error:
                is_momentary = has_trained or size != self.config.cluster.workers
                if isinstance(error.refusal, Misplaced) and is_momentary:
                    cause = f"with {size}, {error.refusal.problem}"
                    self.room.put_off(size, error.refusal.problem)
                    logger.warning("%s", cause)
                else:
                    has_saved = any(event["event"] == EventKind.SAVE for event in events.poll())
                    self._failed(error, budget, leaving.departure, has_saved=has_saved)
                    has_trained = has_trained or bool(steps.poll())
            else:
                has_trained = True
                if not result.is_cut:
                    return result
                if growth.goal is not None:
                    goal, cause = growth.goal, "the cluster has room for more"
            if leaving.departure is not None and leaving.departure.is_drivers:
                raise EndedEarly(f"Ended early, for {leaving.departure}.")

    def _growth(self, size: int, cut: Cut) -> Growth:
        return Growth(
            self.room,
            self.folder,
            size=size,
            num_steps=self.config.train.steps,
            after_s=self.config.cluster.grow_after_s,
            order=cut.order,
        )

    def _depart(self, cut: Cut, departure: Departure) -> None:
        cut.order()
        note(self.folder, EventKind.NOTICE, cause=str(departure))

    def _failed(
        self,
        error: AttemptFailed,
        budget: Budget,
        departure: Departure | None,
        *,
        has_saved: bool,
    ) -> None:
        """Note a failure and pause; raises unless another attempt is to be made."""
        record = error.report.as_record()
        if departure is None:
            budget.count(record, is_after_progress=has_saved)
        goes_on = not (error.report.is_final or error.refusal or budget.is_spent)
        pause_s = budget.delay_s if goes_on and departure is None else 0.0
        in_a_row = len(budget.streak)
        fields = {**record, "in_a_row": in_a_row, "pause_seconds": pause_s}
        note(self.folder, EventKind.FAILURE, **fields)
        if error.refusal is not None:
            raise error.refusal from None
        if not goes_on:
            most, logs = self.config.cluster.max_failures, self.folder / LOGS_FOLDER
            raise WorkError(last_word(error.report, budget.streak, most, logs)) from None
        self.pause(pause_s)
