"""Whether a published checkpoint is whole."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from shoal.checkpoint.files import FileRecord, record_of
from shoal.checkpoint.manifest import MANIFEST_NAME, Manifest
from shoal.errors import WorkError


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """One file that is not as it was written."""

    file: Path
    """The file."""

    problem: str
    """What is wrong with it."""

    def __str__(self) -> str:
        return f"{self.file} {self.problem}"


def verify(path: Path) -> tuple[Damage, ...]:
    """Read every byte of a checkpoint and name each file that is damaged; empty if it is whole."""
    found = damages(path)
    if found:
        return found
    return contents_damages(path, Manifest.read(path).files.items())


def damages(path: Path, *, step: int | None = None) -> tuple[Damage, ...]:
    """The cheap part of ``verify``: the manifest, and the size of every file.

    With ``step``, the manifest must be of that step.
    """
    try:
        manifest = Manifest.read(path)
    except WorkError as error:
        message = str(error).removeprefix(f"{path / MANIFEST_NAME} ")
        return (Damage(file=path / MANIFEST_NAME, problem=message),)
    if step not in (None, manifest.step):
        message = f"is of step {manifest.step}, its folder's name says {step}"
        return (Damage(file=path / MANIFEST_NAME, problem=message),)
    return tuple(
        Damage(file=path / name, problem=problem)
        for name, record in manifest.files.items()
        if (problem := _size_problem(path / name, record))
    )


def contents_damages(path: Path, files: Iterable[tuple[str, FileRecord]]) -> tuple[Damage, ...]:
    """The dear part of ``verify`` for some of a checkpoint's files: their checksums."""
    found = []
    for name, record in files:
        try:
            actual = record_of(path / name)
        except OSError as error:
            found.append(Damage(file=path / name, problem=f"cannot be read: {error.strerror}"))
            continue
        if actual != record:
            found.append(Damage(file=path / name, problem="does not match its checksum"))
    return tuple(found)


def _size_problem(file: Path, record: FileRecord) -> str | None:
    try:
        status = os.stat(file)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if not stat.S_ISREG(status.st_mode):
        return "is not a file"
    if status.st_size != record.num_bytes:
        return f"has {status.st_size} bytes instead of {record.num_bytes}"
    return None
