"""Files of lines, each a JSON object: appending to them, and following what others append.

A disk that fills and a machine that crashes leave the beginning of a line. Whoever appends next
ends it, and readers pass over it: one line is lost, and none of those around it.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import IO, Any

from shoal.errors import disk_error

logger = logging.getLogger(__name__)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the system refuses about ``path`` into a WorkError that names path and cause.

    Unavailable where another attempt may be let.
    """
    try:
        yield
    except OSError as error:
        raise disk_error(f"cannot write {path}: {error.strerror}.", error) from error


def open_lines(path: Path) -> FileIO:
    """A file that ``append_line`` takes; nothing that was refused is kept and tried again later."""
    return path.open("a+b", buffering=0)


def append_line(file: FileIO, record: Mapping[str, Any]) -> None:
    """Append an object by one write, so that lines of several processes of one machine do not mix.

    Raises OSError where the disk does not take all of it.
    """
    data = memoryview(json.dumps(record).encode() + b"\n")
    if _is_cut_short(file):
        data = memoryview(b"\n" + data)
    while data:
        data = data[file.write(data) :]


def _is_cut_short(file: FileIO) -> bool:
    end = file.seek(0, os.SEEK_END)
    if not end:
        return False
    file.seek(end - 1)
    return file.read(1) != b"\n"


def records(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The objects of whole lines; what is none, is told in the log and passed over."""
    for line in lines:
        record = record_of(line)
        if record is not None:
            yield record
        elif line.strip():
            logger.warning("Passed over what is no whole line: %.60r", line)


def record_of(line: bytes) -> dict[str, Any] | None:
    """A line's object; none where it has not come to its end."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewLines:
    """Whole lines that came since the last look."""

    lines: tuple[bytes, ...]
    """With their ends. After a cut, all lines of the file."""

    was_cut: bool = False
    """Whether the file was cut before the end of what had been read."""


class LineReader:
    """Reads a growing file, which need not exist yet; notices when its end was cut off."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last_line = b""
        self._offset = 0

    def poll(self) -> NewLines:
        """What is new; a line without its end is left for later."""
        try:
            with self._path.open("rb") as file:
                return self._read(file)
        except FileNotFoundError:
            return NewLines(lines=())

    def _read(self, file: IO[bytes]) -> NewLines:
        file.seek(self._offset - len(self._last_line))
        was_cut = file.read(len(self._last_line)) != self._last_line
        if was_cut:
            self._offset, self._last_line = 0, b""
            file.seek(0)
        lines = tuple(line for line in file if line.endswith(b"\n"))
        if lines:
            self._offset += sum(len(line) for line in lines)
            self._last_line = lines[-1]
        return NewLines(lines=lines, was_cut=was_cut)
