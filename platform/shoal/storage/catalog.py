"""Which steps a folder of checkpoints holds, and which may go.

    step-00000010/                  a published step: complete, or damaged since
    .step-00000010.tmp-<token>/     a save under way, or left over from one that was killed
    .step-00000010.old-<token>/     a step being deleted
    .step-00000010.bad-<token>/     a damaged step moved aside by a new save of the same step

Only the first is ever read. What is called otherwise belongs to someone else and stays.
"""

from __future__ import annotations

import logging
import re
import shutil
import time
import uuid
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from shoal.storage.files import flush_folder
from shoal.storage.verify import damages

logger = logging.getLogger(__name__)

_LOOK_S = 0.25

_STEP = re.compile(r"step-(\d{8,})")
_LEFTOVER = re.compile(r"\.step-(\d{8,})\.(?:tmp|old)-[0-9a-f]{8}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One published checkpoint."""

    number: int
    """Steps taken when it was saved."""

    path: Path
    """Its folder."""


def step_name(number: int) -> str:
    """Name of a step's folder."""
    return f"step-{number:08d}"


def hidden_name(number: int, purpose: str, token: str) -> str:
    """Name of a step's folder while it is no published step."""
    return f".{step_name(number)}.{purpose}-{token}"


def new_token() -> str:
    """Something no other save has used."""
    return uuid.uuid4().hex[:8]


def steps(folder: Path) -> tuple[Step, ...]:
    """The complete steps in a folder of checkpoints, oldest first; none where there is no folder.

    Complete means that the manifest is whole and every file has its size; ``verify`` also checks
    the contents. Damaged steps are named in the log.
    """
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _STEP.fullmatch(path.name)
        if match is None or not path.is_dir():
            continue
        step = Step(number=int(match[1]), path=path)
        problems = damages(path, step=step.number)
        if problems:
            logger.warning("%s is not complete and is passed over: %s", path, problems[0])
        else:
            found.append(step)
    return tuple(sorted(found, key=lambda step: step.number))


def newest(folder: Path) -> Step | None:
    """The last complete step, or none."""
    found = steps(folder)
    return found[-1] if found else None


def prune(folder: Path, keep: int | None, *, pinned: Collection[int] = ()) -> tuple[Step, ...]:
    """Delete complete steps but the newest ``keep`` and the pinned ones; returns the deleted ones.

    One process of a run calls it. ``keep`` unset keeps all. Steps that are not complete neither
    count nor go. A step loses its name before its files, so none is ever seen half deleted.
    """
    assert keep is None or keep >= 1, "the newest step always stays"
    found = steps(folder)
    doomed = [] if keep is None else [s for s in found[:-keep] if s.number not in pinned]
    for step in doomed:
        hidden = folder / hidden_name(step.number, "old", new_token())
        step.path.rename(hidden)
        flush_folder(folder)
        shutil.rmtree(hidden)
    return tuple(doomed)


def prune_or_warn(folder: Path, keep: int | None) -> None:
    """Prune after a save, which stands whether or not the disk lets older steps go."""
    try:
        prune(folder, keep)
    except OSError as error:
        logger.warning("%s: older steps could not be deleted: %s", folder, error)


def clean(folder: Path) -> tuple[Path, ...]:
    """Delete what killed saves and deletions left behind; returns the deleted folders.

    Only the holder of the run's folder may call this, and not while it saves. Whoever might still
    write there finds its folder gone, all at once, and publishes nothing.
    """
    leftovers = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _LEFTOVER.fullmatch(path.name)
        if match and path.is_dir():
            logger.info("Deleting %s, left behind by an earlier save.", path)
            doomed = folder / hidden_name(int(match[1]), "old", new_token())
            path.rename(doomed)
            shutil.rmtree(doomed)
            leftovers.append(path)
    return tuple(leftovers)


def await_saves(folder: Path, *, timeout_s: float) -> bool:
    """Wait until no save is under way in a folder of checkpoints; whether that was in time.

    For processes that neither save nor load. A save that waits for another follows within
    milliseconds, so two looks must find none.
    """
    deadline = time.monotonic() + timeout_s
    num_quiet = 0
    while num_quiet < 2:
        if time.monotonic() > deadline:
            logger.warning("%s: a save was still under way after %g s.", folder, timeout_s)
            return False
        num_quiet = 0 if any(folder.glob(".step-*.tmp-*")) else num_quiet + 1
        time.sleep(_LOOK_S)
    return True
