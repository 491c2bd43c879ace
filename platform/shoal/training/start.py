"""Where a run, or another attempt of it, goes on."""

from __future__ import annotations

from pathlib import Path

from shoal.checkpoint import Location, RunFolder, Step, location_of, newest, steps
from shoal.config import RESUME_WORDS
from shoal.errors import ConfigError

RESUME = "checkpoint.resume"


def starting_point(folder: Location, resume: str) -> Location | None:
    """The checkpoint to start from, or None to start anew.

    ``folder`` holds the run's own checkpoints. The newest complete one comes first, whatever
    ``resume`` says: an attempt after a failure must go on from there. Without any, a path in
    ``resume`` is taken.
    """
    own = newest(folder)
    if own is not None:
        return own.path
    return None if resume in RESUME_WORDS else location_of(resume, RESUME)


def check_resume(folder: Location, resume: str) -> None:
    """Refuse a ``checkpoint.resume`` that the run's own checkpoints contradict.

    Raises ConfigError for ``never`` where there are some, and for the path of one that is not the
    newest: the steps after it would be made, and saved, twice.
    """
    own = steps(folder)
    if not own:
        return
    if resume == "never":
        raise ConfigError(
            RESUME,
            resume,
            f"{folder} holds {_listed(own)} of an earlier run",
            "Choose another run.name, or resume with auto",
        )
    chosen = _same(location_of(resume, RESUME))
    if any(_same(step.path) == chosen for step in own[:-1]):
        raise ConfigError(
            RESUME,
            resume,
            f"the run went on to step {own[-1].number}",
            "Choose another run.name to branch off, or delete the later steps",
        )


def check_storage(run: RunFolder, resume: str) -> None:
    """Refuse a ``checkpoint.storage`` that has the run leave its checkpoints behind.

    Raises ConfigError where the run has saved elsewhere and nothing here yet: it would begin anew.
    """
    before = RunFolder.found(run.path).checkpoints
    if before == run.checkpoints or resume != "auto" or newest(run.checkpoints) is not None:
        return
    if (left := newest(before)) is not None:
        raise ConfigError(
            "checkpoint.storage",
            run.storage,
            f"the run's checkpoints up to step {left.number} are in {before}",
            f"Go on from there with checkpoint.resume={left.path}, or choose another run.name",
        )


def _same(location: Location) -> Location:
    """One name for one place."""
    return location.resolve() if isinstance(location, Path) else location


def _listed(own: tuple[Step, ...]) -> str:
    numbers = ", ".join(str(step.number) for step in own)
    return f"the checkpoint of step {numbers}" if len(own) == 1 else f"checkpoints {numbers}"
