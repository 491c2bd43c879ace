"""Keeps a second run out of a run's folder in a store, which knows no locks.

The holder writes an object every few seconds. Who finds one waits for the next sign of life, which
keeps it out, and takes over once there was none for ``STALE_S``, by the store's own clock if it has
one. Of two that begin at once the later writer stays. The object says who holds the folder, so that
on one host a holder that died is found out at once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

from shoal.storage.files import told
from shoal.storage.location import StorePath
from shoal.storage.medium import new_token
from shoal.storage.owner import LOCK_NAME, STALE_S, Owner, holding, in_use
from shoal.storage.store import StoreMedium, connect

logger = logging.getLogger(__name__)

_LOOK_S = 1.0
"""Seconds between two looks for a sign of life."""

_NEXT = b"\n"

_SETTLE_S = 0.5
"""Seconds for another run that began at the same moment to be heard of."""


@contextmanager
def lease(folder: StorePath) -> Iterator[None]:
    """Hold a run's folder, after a try of all that a run does there.

    Raises ConfigError where another run holds it, WorkError once another has taken it over, and
    ``OSError`` where the store refuses to list, write, read or delete.
    """
    medium = connect(folder.scheme, folder.bucket, folder.options)
    lock, own = folder / LOCK_NAME, Owner.here()
    _await_end(medium, lock, _tried(medium, folder))
    medium.put(lock, _sign(own, 0))
    time.sleep(_SETTLE_S)
    if (found := _owner(medium, lock)) != own:
        raise in_use(folder, found)
    numbers = count(1)
    try:
        with holding(
            folder,
            own,
            owner=lambda: _owner(medium, lock),
            sign=lambda: medium.put(lock, _sign(own, next(numbers))),
        ):
            yield
    finally:
        try:
            if _owner(medium, lock) == own:
                medium.delete(lock)
        except OSError as error:
            logger.warning("%s could not be deleted: %s", lock, told(error))


def _tried(medium: StoreMedium, folder: StorePath) -> float | None:
    """The store's own time, if it tells, from an object that is written, read and deleted."""
    probe = folder / f"{LOCK_NAME}.{new_token()}"
    medium.put(probe, b"")
    try:
        medium.sizes(folder)
        changed = medium.changed(probe)
        medium.read(probe)
    finally:
        medium.delete(probe)
    return None if changed is None else changed.timestamp()


def _await_end(medium: StoreMedium, lock: StorePath, now: float | None) -> None:
    """Wait until nobody holds the folder; ``now`` is the store's time. Raises ConfigError.

    A store that does not tell when an object was written is watched for as long as that takes.
    """
    first, changed = _read(medium, lock), medium.changed(lock)
    found = Owner.of(first.partition(_NEXT)[0])
    if found is None:
        return
    age_s = 0.0 if now is None or changed is None else now - changed.timestamp()
    end = time.monotonic() + STALE_S - age_s
    while not found.is_here or found.is_alive_here:
        sign = _read(medium, lock)
        if not sign:
            return
        if sign != first or (found.is_alive_here and time.monotonic() < end):
            raise in_use(lock.parent, found)
        if time.monotonic() > end:
            break
        time.sleep(_LOOK_S)
    logger.warning("%s is taken over from %s, which ended without a word.", lock.parent, found)


def _sign(owner: Owner, number: int) -> bytes:
    """What the lock holds: the owner, and how often it has said so, that it be seen to live."""
    return owner.record + _NEXT + str(number).encode()


def _owner(medium: StoreMedium, lock: StorePath) -> Owner | None:
    return Owner.of(_read(medium, lock).partition(_NEXT)[0])


def _read(medium: StoreMedium, lock: StorePath) -> bytes:
    """What stands in the lock; nothing where there is none."""
    try:
        return medium.read(lock)
    except FileNotFoundError:
        return b""
