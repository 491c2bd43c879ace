"""Makes attempts of a run until one comes to its end; says how large each is, and what is the last.

    room for a size? ──► attempt: a gang of that size, from the newest checkpoint
          ▲                  ├─ failed ──► once too often? yes ──► the run has failed
          ├──────────────────│───────────────── no
          ├──────────────────┤ stopped after a saved step, as there is room for more workers
          │                  └─ ended ──► the run's result

A size that changes, a failure and a wait are events of the run's folder, which the user is shown.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.config import Config
from shoal.errors import WorkError
from shoal.training import EventKind, TrainResult, append_event
from shoal_actors.train.cut import Cut
from shoal_actors.train.failure import AttemptFailed, last_word
from shoal_actors.train.gang import NoRoom
from shoal_actors.train.growth import Growth
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

    introduce: Callable[[int], None]
    """Shows the plan of a number of workers that the run goes on as."""

    def run(self) -> TrainResult:
        """The result of the last attempt.

        Raises WorkError with the first cause where the run is given up, and ConfigError where a
        worker refused the user's input.
        """
        failures: list[dict[str, Any]] = []
        size, goal, cause = None, self.room.sizes[-1], ""
        while True:
            before, size = size, self.room.await_size(goal)
            if size != before:
                if before is not None:
                    self._note(EventKind.RESIZE, **{"from": before, "to": size, "cause": cause})
                self.introduce(size)
            goal, cause = size, "the cluster has no room for more"
            cut = Cut()
            growth = self._growth(size, cut)
            try:
                with growth:
                    result = self.attempt(size, cut)
            except NoRoom as error:
                logger.warning("%s", error)
            except AttemptFailed as error:
                self._failed(error, failures)
            else:
                if not result.is_cut:
                    return result
                goal, cause = growth.goal or size, "the cluster has room for more"

    def _growth(self, size: int, cut: Cut) -> Growth:
        return Growth(
            self.room,
            self.folder,
            size=size,
            num_steps=self.config.train.steps,
            after_s=self.config.cluster.grow_after_s,
            order=cut.order,
        )

    def _failed(self, error: AttemptFailed, failures: list[dict[str, Any]]) -> None:
        """Note a failure among those before; raises unless another attempt is to be made."""
        failures.append(error.report.as_record())
        self._note(EventKind.FAILURE, **failures[-1])
        if error.refusal is not None:
            raise error.refusal from None
        most, logs = self.config.cluster.max_failures, self.folder / LOGS_FOLDER
        if error.report.is_final or len(failures) > most:
            raise WorkError(last_word(error.report, failures, most, logs)) from None

    def _note(self, kind: EventKind, /, **fields: Any) -> None:
        append_event(self.folder, kind, **fields)
