"""Training under Ray Train: the driver of a run, and what each of its workers does."""

from shoal_actors.train.driver import run
from shoal_actors.train.failure import AttemptFailed, FailureReport, RankFailed
from shoal_actors.train.gang import Gang, run_gang

__all__ = [
    "AttemptFailed",
    "FailureReport",
    "Gang",
    "RankFailed",
    "run",
    "run_gang",
]
