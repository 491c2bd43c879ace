"""Whether a published checkpoint is whole."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from shoal.errors import Unavailable, WorkError
from shoal.storage.files import BLOCK_BYTES, FileRecord, reading, unreadable
from shoal.storage.location import Location
from shoal.storage.manifest import Manifest
from shoal.storage.media import medium_of
from shoal.storage.medium import MANIFEST_NAME

_SHARE = 16
"""Blocks that a thread takes at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """One file that is not as it was written."""

    file: Location
    """The file."""

    problem: str
    """What is wrong with it."""

    def __str__(self) -> str:
        return f"{self.file} {self.problem}"


def verify(path: Location) -> tuple[Damage, ...]:
    """Read every byte of a checkpoint and name each file that is damaged; empty if it is whole.

    Raises Unavailable, as all here, where a disk or a store does not let itself be read.
    """
    found = damages(path)
    if found:
        return found
    return contents_damages(path, Manifest.read(path))


def damages(path: Location, *, step: int | None = None) -> tuple[Damage, ...]:
    """The cheap part of ``verify``: the manifest, and the size of every file.

    With ``step``, the manifest must be of that step.
    """
    try:
        manifest = Manifest.read(path)
    except Unavailable:
        raise
    except WorkError as error:
        message = str(error).removeprefix(f"{path / MANIFEST_NAME} ")
        return (Damage(file=path / MANIFEST_NAME, problem=message),)
    if step not in (None, manifest.step):
        message = f"is of step {manifest.step}, its folder's name says {step}"
        return (Damage(file=path / MANIFEST_NAME, problem=message),)
    return size_damages(path, manifest.files)


def size_damages(path: Location, files: Mapping[str, FileRecord]) -> tuple[Damage, ...]:
    """Files that are not there, or of another size."""
    try:
        sizes = medium_of(path).sizes(path)
    except OSError as error:
        return (Damage(file=path, problem=unreadable(path, error)),)
    return tuple(
        Damage(file=path / name, problem=problem)
        for name, record in files.items()
        if (problem := _size_problem(sizes.get(name), record))
    )


def contents_damages(path: Location, manifest: Manifest) -> tuple[Damage, ...]:
    """The dear part of ``verify``: the checksums of every file."""
    return block_damages(path, manifest, dict.fromkeys(manifest.files))


def block_damages(
    path: Location, manifest: Manifest, blocks: Mapping[str, Collection[int] | None]
) -> tuple[Damage, ...]:
    """Check some blocks of some files, or with None all blocks, in several threads."""
    shares = [
        (path / name, manifest.files[name], share)
        for name, wanted in blocks.items()
        for share in _shares(
            range(manifest.files[name].num_blocks) if wanted is None else sorted(wanted)
        )
    ]
    if len(shares) > 1:
        with ThreadPoolExecutor(max_workers=medium_of(path).num_readers()) as pool:
            problems = list(pool.map(lambda share: _contents_problem(*share), shares))
    else:  # a thread would take longer to begin than this to be read
        problems = [_contents_problem(*share) for share in shares]
    found: dict[Location, str] = {}
    for (file, _, _), problem in zip(shares, problems, strict=True):
        if problem is not None:
            found.setdefault(file, problem)
    return tuple(Damage(file=file, problem=problem) for file, problem in found.items())


def _shares(blocks: Sequence[int]) -> Iterator[Sequence[int]]:
    for start in range(0, len(blocks), _SHARE):
        yield blocks[start : start + _SHARE]


def damage_of(file: Location, record: FileRecord, block: int) -> Damage:
    """What to say of a block that is not as it was written."""
    span = record.span(block)
    problem = f"does not match its checksum in bytes {span.start} to {span.stop}"
    return Damage(file=file, problem=problem)


def _contents_problem(file: Location, record: FileRecord, blocks: Sequence[int]) -> str | None:
    try:
        memory = memoryview(bytearray(BLOCK_BYTES))
        with reading(file, record) as reader:
            for block in blocks:
                if not reader.read(block, [memory[: len(record.span(block))]]):
                    return damage_of(file, record, block).problem
    except OSError as error:
        return unreadable(file, error)
    return None


def _size_problem(size: int | None, record: FileRecord) -> str | None:
    if size is None:
        return "is not there, or no file"
    if size != record.num_bytes:
        return f"has {size} bytes instead of {record.num_bytes}"
    return None
