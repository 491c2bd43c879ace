"""Following a file of lines that another process appends to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import IO


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
