"""Steps on a file system, which renames a folder in one go.

    step-00000010/                  a published step: complete, or damaged since
    .step-00000010.tmp-<token>/     a save under way, or left over from one that was killed
    .step-00000010.old-<token>/     a step being deleted
    .step-00000010.bad-<token>/     a damaged step moved aside by a new save of the same step

What is called otherwise belongs to someone else and stays.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from shoal.storage.location import Location
from shoal.storage.medium import SAVE_FOLDER, Sink, Source, State, StepFolder, new_token

_STEP = re.compile(r"step-(\d{8,})")
_LEFTOVER = re.compile(r"\.step-(\d{8,})\.(tmp|old)-[0-9a-f]{8}")
_MOST_THREADS = 8
_MOST_MEMORIES = 1024
"""What Linux takes in one call."""


class LocalMedium:
    """See ``Medium``; a local disk, or one that nodes share."""

    look_s = 0.01

    def num_readers(self, sharers: int = 1) -> int:
        """See ``Files``. A share of the cores, up to a few: more would take turns, and caches."""
        return min(_MOST_THREADS, max(1, len(os.sched_getaffinity(0)) // sharers))

    def create(self, file: Location) -> Sink:
        """See ``Files``."""
        path = _path(file)
        # Not the folder of the save itself, which may have been put away meanwhile.
        if any((parent / SAVE_FOLDER).is_dir() for parent in path.parents):
            path.parent.mkdir(parents=True, exist_ok=True)
        return _LocalSink(path)

    @contextmanager
    def open(self, file: Location) -> Iterator[Source]:
        """See ``Files``."""
        descriptor = os.open(_path(file), os.O_RDONLY)
        try:
            yield _LocalSource(descriptor)
        finally:
            os.close(descriptor)

    def read(self, file: Location) -> bytes:
        """See ``Files``."""
        return _path(file).read_bytes()

    def put(self, file: Location, data: bytes) -> None:
        """See ``Files``."""
        path = _path(file)
        draft = path.with_name(f"{path.name}.draft")
        draft.write_bytes(data)
        os.replace(draft, path)

    def delete(self, file: Location) -> None:
        """See ``Files``."""
        _path(file).unlink()

    def sizes(self, folder: Location) -> dict[str, int]:
        """See ``Files``."""
        path = _path(folder)
        os.stat(path)  # ``walk`` would find nothing in what is not there
        found = {}
        for parent, _, names in os.walk(path):
            for file in (Path(parent, name) for name in names):
                # Others write notes here meanwhile: a draft that was seen may have its name by now.
                with suppress(FileNotFoundError):
                    if file.is_file():
                        found[str(file.relative_to(path))] = file.stat().st_size
        return found

    def step_folders(self, folder: Location) -> Iterator[StepFolder]:
        """See ``Medium``."""
        for path in _path(folder).iterdir() if _path(folder).is_dir() else ():
            if not path.is_dir():
                continue
            if match := _STEP.fullmatch(path.name):
                yield StepFolder(number=int(match[1]), path=path, state=State.PUBLISHED)
            elif match := _LEFTOVER.fullmatch(path.name):
                state = State.UNDER_WAY if match[2] == "tmp" else State.DELETED
                yield StepFolder(number=int(match[1]), path=path, state=state)

    def draft(self, folder: Location, number: int, token: str) -> Location:
        """See ``Medium``."""
        return folder / _hidden_name(number, "tmp", token)

    def final(self, folder: Location, number: int, token: str) -> Location:
        """See ``Medium``."""
        return folder / step_name(number)

    def begin(self, draft: Location) -> None:
        """See ``Medium``."""
        path = _path(draft)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir()
        (path / SAVE_FOLDER).mkdir()

    def has_begun(self, draft: Location) -> bool:
        """See ``Medium``."""
        return (_path(draft) / SAVE_FOLDER).is_dir()

    def publish(self, draft: Location, final: Location, added: Collection[str]) -> None:
        """See ``Medium``. The first flush of a file takes most of the rest along."""
        shutil.rmtree(_path(draft) / SAVE_FOLDER)
        files = [_path(draft) / name for name in added]
        for file in files:
            _flush(file, os.O_RDONLY)
        for folder in {parent for file in files for parent in _inside(_path(draft), file)}:
            _flush_folder(folder)
        _path(draft).rename(_path(final))
        _flush_folder(_path(final).parent)

    def remove(self, path: Location) -> None:
        """See ``Medium``. Whoever might still write there finds its folder gone, all at once."""
        found = re.search(r"step-(\d{8,})", path.name)
        assert found is not None, "only the folders of steps are removed"
        doomed = _path(path).with_name(_hidden_name(int(found[1]), "old", new_token()))
        _path(path).rename(doomed)
        _flush_folder(doomed.parent)
        if doomed.is_symlink():  # to where someone has moved the step, who keeps it there
            doomed.unlink()
        else:
            shutil.rmtree(doomed)

    def set_aside(self, step: StepFolder, token: str) -> None:
        """See ``Medium``."""
        path = _path(step.path)
        path.rename(path.with_name(_hidden_name(step.number, "bad", token)))

    def room(self, folder: Location) -> int | None:
        """See ``Medium``."""
        _path(folder).mkdir(parents=True, exist_ok=True)
        room = shutil.disk_usage(_path(folder))
        return room.free if room.total else None


class _LocalSink:
    """See ``Sink``; short writes are taken to their end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._num_bytes = 0
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)

    def write(self, view: memoryview) -> None:
        """See ``Sink``."""
        sent = 0
        while sent < len(view):
            sent += os.write(self._descriptor, view[sent:])
        # Have the disk begin with these bytes, so that the flush at the end finds little to do.
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, self._num_bytes, sent, os.POSIX_FADV_DONTNEED)
        self._num_bytes += sent

    def finish(self, *, flush: bool) -> int:
        """See ``Sink``."""
        if flush:
            os.fsync(self._descriptor)
            _flush_folder(self._path.parent)
        return os.fstat(self._descriptor).st_size

    def close(self) -> None:
        """See ``Sink``."""
        os.close(self._descriptor)


class _LocalSource:
    """See ``Source``."""

    piece_bytes = 256 * 2**10
    """What was read is in the core's own cache still when it is summed."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read(self, start: int, memories: Sequence[memoryview]) -> int:
        """See ``Source``."""
        return os.preadv(self._descriptor, memories[:_MOST_MEMORIES], start)


def step_name(number: int) -> str:
    """Name of a published step's folder on a file system, and the beginning of any other's."""
    return f"step-{number:08d}"


def _inside(folder: Path, file: Path) -> Iterator[Path]:
    """The folders from that of a file up to ``folder``."""
    for parent in file.parents:
        yield parent
        if parent == folder:
            return


def _hidden_name(number: int, purpose: str, token: str) -> str:
    return f".{step_name(number)}.{purpose}-{token}"


def _path(location: Location) -> Path:
    assert isinstance(location, Path)
    return location


def _flush_folder(folder: Path) -> None:
    """Make the names in a folder last."""
    _flush(folder, os.O_RDONLY | os.O_DIRECTORY)


def _flush(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
