"""Whether a published checkpoint is whole."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import WorkError
from shoal.storage.files import BLOCK_BYTES, BlockReader, FileRecord
from shoal.storage.manifest import MANIFEST_NAME, Manifest

_SHARE = 16
"""Blocks that a thread takes at a time."""

_MOST_THREADS = 8


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
    return contents_damages(path, Manifest.read(path))


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


def contents_damages(path: Path, manifest: Manifest) -> tuple[Damage, ...]:
    """The dear part of ``verify``: the checksums of every file."""
    return block_damages(path, manifest, dict.fromkeys(manifest.files))


def block_damages(
    path: Path, manifest: Manifest, blocks: Mapping[str, Collection[int] | None]
) -> tuple[Damage, ...]:
    """Check some blocks of some files, or with None all blocks, in several threads."""
    shares = [
        (path / name, manifest.files[name], share)
        for name, wanted in blocks.items()
        for share in _shares(
            range(manifest.files[name].num_blocks) if wanted is None else sorted(wanted)
        )
    ]
    with ThreadPoolExecutor(max_workers=num_threads()) as pool:
        problems = pool.map(lambda share: _contents_problem(*share), shares)
        found: dict[Path, str] = {}
        for (file, _, _), problem in zip(shares, problems, strict=True):
            if problem is not None:
                found.setdefault(file, problem)
    return tuple(Damage(file=file, problem=problem) for file, problem in found.items())


def _shares(blocks: Sequence[int]) -> Iterator[Sequence[int]]:
    for start in range(0, len(blocks), _SHARE):
        yield blocks[start : start + _SHARE]


def num_threads() -> int:
    """Threads that read and sum at the same time."""
    return min(_MOST_THREADS, len(os.sched_getaffinity(0)))


def damage_of(file: Path, record: FileRecord, block: int) -> Damage:
    """What to say of a block that is not as it was written."""
    start = block * BLOCK_BYTES
    stop = min(start + BLOCK_BYTES, record.num_bytes)
    return Damage(file=file, problem=f"does not match its checksum in bytes {start} to {stop}")


def _contents_problem(file: Path, record: FileRecord, blocks: Sequence[int]) -> str | None:
    try:
        with BlockReader(file, record, memoryview(bytearray(BLOCK_BYTES))) as reader:
            for block in blocks:
                if not reader.read(block):
                    return damage_of(file, record, block).problem
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None


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
