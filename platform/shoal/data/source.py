"""Which files a source of ``data.sources`` names, and how each is read.

A folder is walked in sorted order without hidden entries (names that start with a dot) and without
following links to folders. With ``format: auto`` a file's ending decides; what has no known ending
is text, and a binary file (one with a NUL byte near its start) is left out of a folder, with a
logged count, and refused where it was named itself.
"""

from __future__ import annotations

import glob
import logging
import os
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal, TypeAlias

from shoal.config import SourceSettings
from shoal.errors import ConfigError

logger = logging.getLogger(__name__)

FileFormat: TypeAlias = Literal["text", "jsonl", "parquet"]

_ENDINGS: dict[str, FileFormat] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".pq": "parquet",
}
_SNIFF_BYTES = 8192


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """One file to tokenize."""

    path: str
    format: FileFormat

    size: int
    """Bytes."""

    modified_ns: int
    """Time of its last change, as the file system keeps it."""


def megatron_prefix(source: SourceSettings) -> str | None:
    """Give the common prefix of ``.bin`` and ``.idx`` if ``source`` is already tokenized."""
    path = Path(source.path)
    stem = str(path.with_suffix("")) if path.suffix in (".bin", ".idx") else source.path
    if source.format == "megatron":
        return stem
    has_pair = Path(f"{stem}.idx").is_file() and Path(f"{stem}.bin").is_file()
    named = path.suffix in (".bin", ".idx") or not path.exists()
    return stem if source.format == "auto" and has_pair and named else None


def list_files(source: SourceSettings, field: str) -> tuple[SourceFile, ...]:
    """List the files of ``source`` in the order in which they are tokenized.

    ``field`` is the source's own key, such as ``data.sources.0``. ConfigError on ``field.path`` or
    ``field.include`` if nothing is there, nothing matches, or all is empty.
    """
    files: list[SourceFile] = []
    binary: list[str] = []
    for path, is_named in _paths(source, field):
        file_format = _format_of(path, source)
        if file_format is None:
            continue
        if file_format == "text" and _is_binary(path):
            if is_named:
                raise ConfigError(
                    f"{field}.path",
                    str(path),
                    "it is a binary file",
                    "Give text in UTF-8, JSONL, Parquet, or the prefix of a .bin and .idx pair",
                )
            binary.append(str(path))
            continue
        status = path.stat()
        files.append(
            SourceFile(
                path=str(path),
                format=file_format,
                size=status.st_size,
                modified_ns=status.st_mtime_ns,
            )
        )
    if binary:
        logger.info("%s: left out %d binary files, first %s", source.path, len(binary), binary[0])
    _refuse_nothing(files, source, field)
    return tuple(files)


def _paths(source: SourceSettings, field: str) -> list[tuple[Path, bool]]:
    """Files that ``include`` lets through, each with whether the user named it itself."""
    top = Path(source.path)
    if top.exists():
        tops = [top]
    else:
        tops = sorted({Path(match) for match in glob.glob(source.path, recursive=True)}, key=_order)
    if not tops:
        is_pattern = glob.has_magic(source.path)
        raise ConfigError(
            f"{field}.path",
            source.path,
            "no file matches the pattern" if is_pattern else "there is no such file or folder",
            f"Check the path; it is read from {os.getcwd()}",
        )
    found: dict[Path, bool] = {}
    for path in tops:
        if path.is_dir():
            for inside in _walk(path):
                found.setdefault(inside, False)
        elif not path.is_file():  # reading a pipe or a device may never end
            raise ConfigError(
                f"{field}.path", str(path), "it is neither a file nor a folder", "Name a file"
            )
        else:
            found[path] = not glob.has_magic(source.path)
    chosen = [(path, is_named) for path, is_named in found.items() if _included(path, source)]
    if found and not chosen:
        raise ConfigError(
            f"{field}.include",
            list(source.include),
            f"none of the {len(found)} files under {source.path} matches",
            "Give patterns of file names, such as '*.py'",
        )
    return chosen


def _walk(folder: Path) -> list[Path]:
    """Every file below ``folder`` that is not hidden, sorted by the parts of its path."""
    paths = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths += [Path(parent, name) for name in names if not name.startswith(".")]
    return sorted((path for path in paths if path.is_file()), key=_order)


def _order(path: Path) -> tuple[str, ...]:
    return path.parts


def _included(path: Path, source: SourceSettings) -> bool:
    return not source.include or any(fnmatchcase(path.name, pattern) for pattern in source.include)


def _format_of(path: Path, source: SourceSettings) -> FileFormat | None:
    """How to read ``path``; None for a file of a folder that is not of the format asked for."""
    by_ending = _ENDINGS.get(path.suffix.lower())
    if source.format in ("jsonl", "parquet"):
        is_chosen = by_ending == source.format or bool(source.include)
        return source.format if is_chosen or not Path(source.path).is_dir() else None
    return "text" if source.format == "text" or by_ending is None else by_ending


def _is_binary(path: Path) -> bool:
    with path.open("rb") as stream:
        return b"\0" in stream.read(_SNIFF_BYTES)


def _refuse_nothing(files: list[SourceFile], source: SourceSettings, field: str) -> None:
    if files and any(file.size for file in files):
        return
    kind = "text" if source.format == "auto" else source.format
    raise ConfigError(
        f"{field}.path",
        source.path,
        "it is empty" if files else f"it holds no {kind} file",
        "Give a file or folder with something to learn from",
    )
