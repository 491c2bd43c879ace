"""Keeps a second run out of a run's folder in a store, which knows no locks.

The holder writes an object every few seconds. Who finds one waits for the next sign of life, which
keeps it out, and takes over once there was none for ``STALE_S`` by the store's own clock. Of two
that begin at once the later writer stays. The object says who holds the folder, so that on one host
a holder that died is found out at once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from shoal.storage.catalog import new_token
from shoal.storage.files import told
from shoal.storage.location import StorePath
from shoal.storage.owner import LOCK_NAME, STALE_S, Owner, in_use, signs_of_life
from shoal.storage.store import StoreMedium, connect

logger = logging.getLogger(__name__)

_LOOK_S = 1.0
"""Seconds between two looks for a sign of life."""

_SETTLE_S = 0.5
"""Seconds for another run that began at the same moment to be heard of."""


@contextmanager
def lease(folder: StorePath) -> Iterator[None]:
    """Hold a run's folder, after a try of all that a run does there.

    Raises ConfigError where another run holds it, and ``OSError`` where the store refuses to list,
    write, read or delete.
    """
    medium = connect(folder.scheme, folder.bucket, folder.options)
    lock, own = folder / LOCK_NAME, Owner.here()
    _await_end(medium, lock, _tried(medium, folder))
    medium.put(lock, own.record)
    time.sleep(_SETTLE_S)
    _check(medium, lock, own)

    def beat() -> None:
        if _owner(medium, lock) != own:
            raise OSError(f"{lock} was taken by another run")
        medium.put(lock, own.record)

    try:
        with signs_of_life(beat):
            yield
    finally:
        try:
            if _owner(medium, lock) == own:
                medium.delete(lock)
        except OSError as error:
            logger.warning("%s could not be deleted: %s", lock, told(error))


def _tried(medium: StoreMedium, folder: StorePath) -> float:
    """The store's own time, from an object that is written, found, read and deleted."""
    probe = folder / f"{LOCK_NAME}.{new_token()}"
    medium.put(probe, b"")
    try:
        medium.sizes(folder)
        changed = medium.changed(probe)
        medium.read(probe)
    finally:
        medium.delete(probe)
    return time.time() if changed is None else changed.timestamp()


def _await_end(medium: StoreMedium, lock: StorePath, now: float) -> None:
    """Wait until nobody holds the folder; ``now`` is the store's time. Raises ConfigError."""
    ahead = now - time.time()
    found, first = _owner(medium, lock), medium.changed(lock)
    if found is None or first is None:
        return
    while not found.is_here or found.is_alive_here:
        changed = medium.changed(lock)
        if changed is None:
            return
        if changed != first or found.is_alive_here:
            raise in_use(lock.parent, found)
        if time.time() + ahead - changed.timestamp() > STALE_S:
            break
        time.sleep(_LOOK_S)
    logger.warning("%s is taken over from %s, which ended without a word.", lock.parent, found)


def _owner(medium: StoreMedium, lock: StorePath) -> Owner | None:
    try:
        return Owner.of(medium.read(lock))
    except FileNotFoundError:
        return None


def _check(medium: StoreMedium, lock: StorePath, own: Owner) -> None:
    found = _owner(medium, lock)
    if found != own:
        raise in_use(lock.parent, found)
