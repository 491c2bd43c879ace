"""Which steps of a run an argument means: a path, or the URI of a store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from shoal.errors import ConfigError, WorkError
from shoal.storage import (
    MANIFEST_NAME,
    Location,
    location_of,
    medium_of,
    newest,
    published,
    told,
)

_REMEDY = "Give a run's folder, such as runs/run, or where its checkpoints are"


def step_of(text: str, argument: str) -> Location:
    """A step's folder: ``text`` itself, or the newest complete step of the run at ``text``.

    Raises ConfigError that names ``argument``, and WorkError where a store does not answer.
    """
    place = _place(text, argument)
    if _is_step(place):
        return place
    with answers(place):
        found = newest(place)
    if found is None and (others := _steps_beside(place)):
        raise ConfigError(argument, text, "there is no such step", others)
    if found is None:
        problem, remedy = "the run has no complete checkpoint", "Train it first"
        raise ConfigError(argument, text, problem, remedy)
    return found.path


def steps_of(text: str, argument: str) -> Sequence[Location]:
    """The folders of the steps that ``text`` means, whole or not; raises as ``step_of`` does."""
    place = _place(text, argument)
    if _is_step(place):
        return [place]
    with answers(place):
        found = published(place)
    if not found:
        remedy = _steps_beside(place) or _REMEDY
        raise ConfigError(argument, text, "it holds no checkpoints", remedy)
    return [step.path for step in found]


@contextmanager
def answers(place: Location) -> Iterator[None]:
    """Turn what a disk or a store refuses into a WorkError."""
    try:
        yield
    except OSError as error:
        raise WorkError(f"{place} cannot be used: {told(error)}") from error


def _place(text: str, argument: str) -> Location:
    """The folder of a step, or that of a run's checkpoints."""
    from shoal.checkpoint import RunFolder  # torch takes seconds to load

    location = location_of(text, argument)
    if not isinstance(location, Path):
        return location
    if not location.is_dir():
        remedy = _steps_beside(location) or _REMEDY
        raise ConfigError(argument, text, "there is no such folder", remedy)
    run = RunFolder.found(location)
    is_run = run.storage is not None or (location / "checkpoints").is_dir()
    return run.checkpoints if is_run else location


def _steps_beside(place: Location) -> str | None:
    """What to give in place of a step that is missing; none where none is beside it."""
    folder = place.parent
    if not place.name.startswith("step-") or (isinstance(folder, Path) and not folder.is_dir()):
        return None
    with answers(folder):
        steps = published(folder)
    return "Give one of " + ", ".join(str(step.path) for step in steps) if steps else None


def _is_step(place: Location) -> bool:
    if isinstance(place, Path) and (place / MANIFEST_NAME).is_file():
        return True  # whatever it is called now
    with answers(place):
        return any(found.path == place for found in medium_of(place).step_folders(place.parent))
