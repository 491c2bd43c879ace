"""Which steps a folder of checkpoints holds, and which may go.

Only what is published and complete is ever read. What a save was killed at, or a deletion, goes
with the next save; what is called otherwise belongs to someone else and stays.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from shoal.errors import Unavailable
from shoal.storage.files import told
from shoal.storage.location import Location
from shoal.storage.media import medium_of
from shoal.storage.medium import State, StepFolder
from shoal.storage.verify import damages

logger = logging.getLogger(__name__)

PIN_NAME = "pinned"
"""A file of this name in a step's folder keeps the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One published checkpoint."""

    number: int
    """Steps taken when it was saved."""

    path: Location
    """Its folder."""


def published(folder: Location) -> tuple[Step, ...]:
    """All published steps, complete or damaged since, oldest first.

    Raises Unavailable, as all that looks for steps, where the medium does not tell.
    """
    found = [
        Step(number=each.number, path=each.path)
        for each in _folders(folder)
        if each.state is State.PUBLISHED
    ]
    return tuple(sorted(found, key=lambda step: (step.number, step.path.name)))


def steps(folder: Location) -> tuple[Step, ...]:
    """The complete steps in a folder of checkpoints, oldest first; none where there is no folder.

    Complete means that the manifest is whole and every file has its size; ``verify`` also checks
    the contents. Damaged steps are named in the log.
    """
    return tuple(reversed(list(_complete(folder))))


def newest(folder: Location) -> Step | None:
    """The last complete step, or none."""
    return next(_complete(folder), None)


def _complete(folder: Location) -> Iterator[Step]:
    """The complete steps, newest first; of two with one number, which a store may hold, one."""
    last: int | None = None
    for step in reversed(published(folder)):
        problems = damages(step.path, step=step.number)
        if problems:
            logger.warning("%s is not complete and is passed over: %s", step.path, problems[0])
        elif step.number != last:
            last = step.number
            yield step


def pin(step: Location) -> None:
    """Keep the step in a folder whatever the retention; raises ``OSError``."""
    medium_of(step).put(step / PIN_NAME, b"")


def unpin(step: Location) -> None:
    """Leave a step to the retention again; raises ``OSError``."""
    if is_pinned(step):
        medium_of(step).delete(step / PIN_NAME)


def is_pinned(step: Location) -> bool:
    """Whether no retention may delete a step; raises ``OSError``."""
    return PIN_NAME in medium_of(step).sizes(step)


def prune(folder: Location, keep: int | None) -> tuple[Step, ...]:
    """Delete complete steps but the newest ``keep`` and the pinned ones; returns the deleted ones.

    One process of a run calls it. ``keep`` unset keeps all. Steps that are not complete neither
    count nor go. A step loses its name before its files, so none is ever seen half deleted.
    """
    assert keep is None or keep >= 1, "the newest step always stays"
    if keep is None:
        return ()
    doomed = [step for step in steps(folder)[:-keep] if not is_pinned(step.path)]
    for step in doomed:
        medium_of(folder).remove(step.path)
    return tuple(doomed)


def prune_or_warn(folder: Location, keep: int | None) -> None:
    """Prune after a save, which stands whether or not the medium lets older steps go."""
    try:
        prune(folder, keep)
    except Unavailable as error:
        logger.warning("Older steps were not deleted: %s", error)
    except OSError as error:
        logger.warning("%s: older steps could not be deleted: %s", folder, told(error))


def clean(folder: Location) -> tuple[Location, ...]:
    """Delete what killed saves and deletions left behind; returns the deleted folders.

    Only the holder of the run's folder may call this, and not while it saves. Whoever might still
    write there finds its folder gone and publishes nothing. What does not let itself be deleted
    stays, and is named in the log: it is no step and in nobody's way.
    """
    leftovers = [each.path for each in _folders(folder) if each.state is not State.PUBLISHED]
    return tuple(path for path in leftovers if _removed(path))


def discard(draft: Location) -> None:
    """Delete what a failed save wrote, if it lets itself be deleted; otherwise ``clean`` does."""
    _removed(draft)


def _removed(path: Location) -> bool:
    try:
        medium_of(path).remove(path)
    except FileNotFoundError:
        return False  # it had not begun
    except OSError as error:
        logger.warning("%s could not be deleted: %s", path, told(error))
        return False
    logger.info("Deleted %s, which a save had left behind.", path)
    return True


def _folders(folder: Location) -> list[StepFolder]:
    try:
        return list(medium_of(folder).step_folders(folder))
    except OSError as error:
        raise Unavailable(f"{folder} cannot be looked at: {told(error)}.") from error
