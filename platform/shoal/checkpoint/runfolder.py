"""A run's folder, and the lock by which one run at a time writes into it.

The lock is ``flock`` on ``run.lock``, which the system gives back however its holder ends, so that
on one host (and on shared file systems that carry ``flock`` across hosts, such as NFS version 4) a
lock that can be taken is free. Where ``flock`` does not reach other hosts, the heartbeat decides:
the holder touches the file every few seconds, and another host may take over once it is older than
``STALE_S`` by the file system's own clock. The file says who holds the lock; a holder that ends in
order empties it. The process that drives a run holds the lock, its ranks do not ask for it.

Where ``checkpoint.storage`` has the checkpoints lie elsewhere, that folder is held as well: two
runs of one name in two places would otherwise meet there.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import yaml

from shoal.errors import ConfigError, WorkError
from shoal.storage import Location, StorePath, lease, location_of_store, medium_of, told
from shoal.storage.owner import LOCK_NAME, STALE_S, Owner, holding, in_use

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.yaml"
"""Where, in a run's folder, its resolved configuration stands."""

STORAGE = "checkpoint.storage"
"""The setting that has checkpoints lie elsewhere."""

_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


class _Flock(Enum):
    """What the system said when asked for the lock."""

    TAKEN = "taken"
    HELD = "held by another"
    UNKNOWN = "this file system has no locks"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The folder of one run, ``run.dir/run.name``."""

    path: Path
    """Where it is."""

    storage: str | None = None
    """``checkpoint.storage``."""

    @classmethod
    def found(cls, path: Path) -> RunFolder:
        """The folder of a run that was begun, which says itself where its checkpoints are.

        Raises WorkError where what says so cannot be read.
        """
        file = path / CONFIG_FILE
        try:
            config = yaml.safe_load(file.read_text(encoding="utf-8"))
            storage = config["checkpoint"]["storage"]
        except (FileNotFoundError, NotADirectoryError, KeyError, TypeError):
            return cls(path)
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            raise WorkError(
                f"{file}, which says where the run's checkpoints are, cannot be read: {error}. "
                "Give their folder or URI instead."
            ) from error
        return cls(path, None if storage is None else str(storage))

    @property
    def checkpoints(self) -> Location:
        """Folder of the run's checkpoints."""
        if self.storage is None:
            return self.path / "checkpoints"
        return location_of_store(self.storage, STORAGE) / self.path.name

    def room(self) -> int | None:
        """Free bytes for checkpoints, where the medium tells; only for who holds the folder."""
        return medium_of(self.checkpoints).room(self.checkpoints)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Make the folder if there is none, and keep other runs out of it, and of its checkpoints.

        Raises ConfigError on ``run.name`` where another run holds one of them, and on
        ``checkpoint.storage`` where the checkpoints' cannot be used; WorkError where the folder
        cannot be made or written, and once another run has taken it over.
        """
        with self._lock():
            if self.storage is None or self._is(self.checkpoints):
                yield
                return
            with _held(self.storage, self.checkpoints):
                yield

    def _is(self, folder: Location) -> bool:
        """Whether ``file:///`` with ``run.dir`` leads back to here."""
        return isinstance(folder, Path) and folder.resolve() == self.path.resolve()

    @contextmanager
    def _lock(self) -> Iterator[None]:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            try:
                own = self._take(descriptor)
            except OSError as error:
                raise self._unwritable(error) from error
            try:
                with holding(
                    self.path,
                    own,
                    owner=lambda: _owner(descriptor),
                    sign=lambda: os.utime(descriptor),
                ):
                    yield
            finally:
                if _owner(descriptor) == own:
                    os.ftruncate(descriptor, 0)
        finally:
            os.close(descriptor)

    def _take(self, descriptor: int) -> Owner:
        flock, owner, own = _flock(descriptor), _owner(descriptor), Owner.here()
        out_of_reach = owner is not None and (flock is _Flock.UNKNOWN or not owner.is_here)
        if flock is _Flock.HELD or (out_of_reach and self._age_s(descriptor) < STALE_S):
            raise in_use(self.path, owner)
        if owner is not None:
            logger.warning(
                "%s is taken over from %s, which ended without a word.", self.path, owner
            )
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, own.record, 0)
        return own

    def _age_s(self, descriptor: int) -> float:
        """Seconds since the last sign of life, by the clock that stamps both files."""
        with tempfile.NamedTemporaryFile(dir=self.path, prefix=".run.lock.") as now:
            return os.fstat(now.fileno()).st_mtime - os.fstat(descriptor).st_mtime

    def _unwritable(self, error: OSError) -> WorkError:
        return WorkError(f"{self.path} cannot be written: {error.strerror}.")


@contextmanager
def writing_into(run: Location) -> Iterator[Location]:
    """The folder of the checkpoints of a run, on a disk or in a store, held for whoever writes."""
    if isinstance(run, StorePath):
        with _held(str(run.parent), run):
            yield run
    else:
        folder = RunFolder.found(run)
        with folder.lock():
            yield folder.checkpoints


@contextmanager
def _held(storage: str, folder: Location) -> Iterator[None]:
    """Hold the folder of a run's checkpoints where it is not in that of the run."""
    held = lease(folder) if isinstance(folder, StorePath) else RunFolder(folder).lock()
    with ExitStack() as stack:
        try:
            stack.enter_context(held)
        except (OSError, WorkError) as error:
            reason = told(error) if isinstance(error, OSError) else str(error).rstrip(".")
            raise ConfigError(
                STORAGE,
                storage,
                f"checkpoints cannot be listed, written, read and deleted there: {reason}",
                "Name a place that exists, and give this environment what it takes to use it",
            ) from error
        yield


def _owner(descriptor: int) -> Owner | None:
    return Owner.of(os.pread(descriptor, 4096, 0))


def _flock(descriptor: int) -> _Flock:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return _Flock.HELD
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
        logger.warning("%s: %s; only signs of life guard the folder.", LOCK_NAME, error.strerror)
        return _Flock.UNKNOWN
    return _Flock.TAKEN
