"""The files of a journal: ``segment-00000001.journal`` and so on, each written by one process once.

A segment is appended to, and closed for good when it is large enough, when its process ends, or
when the disk fails: after an fsync that failed nobody knows what of the file is on the disk, so
what was to be stored goes into a new segment as well. Numbers only rise. Where closed segments are
kept up to a size only, the oldest go when a new one has come.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from shoal.inference.journal.records import header_line

logger = logging.getLogger(__name__)

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
    return sorted(filter(_is_segment, folder.iterdir()), key=_number_of)


def _is_segment(path: Path) -> bool:
    return _NAME.fullmatch(path.name) is not None


def _number_of(segment: Path) -> int:
    match = _NAME.fullmatch(segment.name)
    assert match is not None
    return int(match[1])


def create(path: Path) -> File:
    """A new file to append to, unbuffered; FileExistsError where there is one."""
    return path.open("xb", buffering=0)


class Segments:
    """The store of one process in ``folder``, which exists; a segment begins with ``facts``.

    Of older segments, whoever wrote them, the newest stay, up to ``keep_bytes`` together; with None
    all do.
    """

    def __init__(
        self,
        folder: Path,
        *,
        segment_bytes: int,
        keep_bytes: int | None = None,
        facts: Mapping[str, str],
        create: Callable[[Path], File] = create,
    ) -> None:
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._keep_bytes = keep_bytes
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
        is_new = self._size == 0
        self._size += len(lines)
        if is_new and self._keep_bytes is not None:
            self._delete_oldest(self._keep_bytes)

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
        number = _number_of(existing[-1]) if existing else 0
        while self._file is None:
            number += 1
            self._path = self._folder / f"segment-{number:08d}.journal"
            with contextlib.suppress(FileExistsError):
                self._file = self._create(self._path)
        self._size = 0

    def _delete_oldest(self, keep_bytes: int) -> None:
        """Delete what is older than this segment, beyond so many bytes."""
        own = _number_of(self._path)
        try:
            older = [path for path in segments_in(self._folder) if _number_of(path) < own]
            for path in reversed(older):
                with contextlib.suppress(FileNotFoundError):  # somebody has moved it away
                    keep_bytes -= path.stat().st_size
                    if keep_bytes < 0:
                        path.unlink()
        except OSError as error:  # tried again with the next segment; what is to be stored goes on
            logger.warning("old segments of the journal cannot be deleted: %s", error)

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
