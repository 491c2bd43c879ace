"""Training under Ray Train: the driver of a run, and what each of its workers does."""

from shoal_actors.train.driver import run
from shoal_actors.train.failure import FailureReport, RankFailed, RunFailed
from shoal_actors.train.gang import Gang, run_gang

__all__ = [
    "FailureReport",
    "Gang",
    "RankFailed",
    "RunFailed",
    "run",
    "run_gang",
]
