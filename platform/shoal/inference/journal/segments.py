"""The files of a journal: ``segment-00000001.journal`` and so on, each written by one process once.

A segment is appended to, and closed for good when it is large enough, when its process ends, or
when the disk fails: after an fsync that failed nobody knows what of the file is on the disk, so
what was to be stored goes into a new segment as well. Numbers only rise.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from shoal.inference.journal.records import header_line

_NAME = re.compile(r"segment-(\d{8,})\.journal")


class Store(Protocol):
    """Where a journal's lines go; all methods are called in its thread."""

    def append(self, lines: bytes, *, sync: bool) -> None:
        """Append whole lines, and have them on the disk with ``sync``.

        Raises OSError where the disk fails; then nothing of ``lines`` counts as stored.
        """
        ...

    def close(self) -> None:
        """Append nothing more; never raises."""
        ...


class File(Protocol):
    """What a segment needs of an open file."""

    def write(self, data: memoryview, /) -> int:
        """Append some of ``data``; how many bytes that were."""
        ...

    def truncate(self, size: int, /) -> int:
        """Cut the file to ``size`` bytes."""
        ...

    def fileno(self) -> int:
        """The descriptor."""
        ...

    def close(self) -> None:
        """Close it."""
        ...


def segments_in(folder: Path) -> list[Path]:
    """Segments in ``folder`` itself, oldest first."""
    found = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir())
    return [path for _, path in sorted((int(m[1]), path) for m, path in found if m)]


def create(path: Path) -> File:
    """A new file to append to, unbuffered; FileExistsError where there is one."""
    return path.open("xb", buffering=0)


class Segments:
    """The store of one process in ``folder``, which exists; a segment begins with ``facts``."""

    def __init__(
        self,
        folder: Path,
        *,
        segment_bytes: int,
        facts: Mapping[str, str],
        create: Callable[[Path], File] = create,
    ) -> None:
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._header = header_line(facts)
        self._create = create
        self._file: File | None = None
        self._path = folder
        self._size = 0
        """Bytes of the segment that are stored."""

    def append(self, lines: bytes, *, sync: bool) -> None:
        """See ``Store``."""
        if self._file is not None and self._size >= self._segment_bytes:
            self.close()
        try:
            if self._file is None:
                self._open()
                lines = self._header + lines
            self._write(lines)
            if sync:
                self._sync()
        except OSError:
            self._abandon()
            raise
        self._size += len(lines)

    def close(self) -> None:
        """See ``Store``."""
        if self._file is not None:
            # What was stored is stored; a failure now says nothing about it.
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None

    def _open(self) -> None:
        """Create the next segment: never one that another process has."""
        existing = segments_in(self._folder)
        number = 0
        if existing:
            match = _NAME.fullmatch(existing[-1].name)
            assert match is not None
            number = int(match[1])
        while self._file is None:
            number += 1
            self._path = self._folder / f"segment-{number:08d}.journal"
            with contextlib.suppress(FileExistsError):
                self._file = self._create(self._path)
        self._size = 0

    def _write(self, lines: bytes) -> None:
        assert self._file is not None
        rest = memoryview(lines)
        while rest:
            rest = rest[self._file.write(rest) :]

    def _sync(self) -> None:
        assert self._file is not None
        os.fsync(self._file.fileno())
        if self._size == 0:  # its name has to be there as well
            folder = os.open(self._folder, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def _abandon(self) -> None:
        """Close the segment after what is stored; leave none of which nothing is."""
        if self._file is None:
            return
        with contextlib.suppress(OSError):  # a reader passes over what cannot be cut off
            if self._size:
                self._file.truncate(self._size)
            else:
                self._path.unlink()
        self.close()
