"""One attempt of a run: a gang of workers, looked after while it trains."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from shoal.training import EventKind, EventReader, TrainJob, TrainResult
from shoal_actors.train.cut import Cut
from shoal_actors.train.gang import Gang, run_gang
from shoal_actors.train.hang import where
from shoal_actors.train.lookout import Lookout
from shoal_actors.train.note import note
from shoal_actors.train.pulse import Sign
from shoal_actors.train.worker import LOGS_FOLDER, work


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """All that an attempt needs besides its size."""

    job: TrainJob
    """The run as configured."""

    gang: Gang
    """Its workers, as many as configured."""

    def __call__(self, size: int, cut: Cut) -> TrainResult:
        """Train as ``size`` workers until the run ends, ``cut`` is ordered, or a worker fails.

        Raises as ``run_gang``.
        """
        folder = self.job.folder.path
        logs = folder / LOGS_FOLDER
        lookout = Lookout(
            logs,
            num_ranks=size,
            patience_s=self.job.config.cluster.straggler_s,
            on_straggler=partial(_note_straggler, folder),
        )
        events = EventReader(folder)
        events.poll()  # those of earlier attempts
        with lookout, cut:
            return run_gang(
                partial(work, cut=cut),
                self.job.at_size(size),
                replace(self.gang, num_workers=size),
                folder=logs / "ray",
                logs=logs,
                on_termination=partial(self._save_at_once, cut, events),
            )

    def _save_at_once(self, cut: Cut, events: EventReader, signal_name: str) -> float:
        """Tell the ranks to save and to end, if they have begun; the seconds that they have."""
        if all(event["event"] != EventKind.START for event in events.poll()):
            return 0.0
        cut.order()
        note(self.job.folder.path, EventKind.NOTICE, cause=f"{signal_name} to the command")
        return self.job.config.cluster.notice_s


def _note_straggler(folder: Path, sign: Sign, waited_s: float) -> None:
    note(
        folder,
        EventKind.STRAGGLER,
        rank=sign.rank,
        message=f"others have waited {waited_s:.0f} s for it; last seen {where(sign)}",
        stack=sign.stack,
    )
