"""One attempt of a run: a gang of workers, looked after while it trains."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from shoal.checkpoint import await_saves
from shoal.errors import WorkError
from shoal.plan import at_size
from shoal.training import EventKind, TrainJob, TrainResult, append_event
from shoal_actors.train.cut import Cut
from shoal_actors.train.gang import Gang, run_gang
from shoal_actors.train.hang import where
from shoal_actors.train.lookout import Lookout
from shoal_actors.train.pulse import Sign
from shoal_actors.train.worker import LOGS_FOLDER, work

DRAIN_TIMEOUT_S = 20.0
"""How long a run that is told to end waits for the saves under way: Kubernetes gives 30 seconds."""

logger = logging.getLogger(__name__)


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
        with lookout, cut:
            return run_gang(
                partial(work, cut=cut),
                replace(self.job, config=at_size(self.job.config, size)),
                replace(self.gang, num_workers=size),
                folder=logs / "ray",
                logs=logs,
                before_termination=partial(
                    await_saves, self.job.folder.checkpoints, timeout_s=DRAIN_TIMEOUT_S
                ),
            )


def _note_straggler(folder: Path, sign: Sign, waited_s: float) -> None:
    try:
        append_event(
            folder,
            EventKind.STRAGGLER,
            rank=sign.rank,
            message=f"others have waited {waited_s:.0f} s for it; last seen {where(sign)}",
            stack=sign.stack,
        )
    except WorkError as error:  # a full disk, say; whoever looks on must not end the run
        logger.warning("%s", error)
