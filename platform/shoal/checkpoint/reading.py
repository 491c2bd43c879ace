"""Reading rows out of a checkpoint's files: just the bytes of the rows that are wanted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import torch

from shoal.checkpoint.entry import Entry
from shoal.checkpoint.index import INDEX_NAME, Stored, StoredBlob, StoredTensor, read_index
from shoal.checkpoint.shard import memory_of, unpack
from shoal.errors import WorkError
from shoal.storage import (
    BLOCK_BYTES,
    Damage,
    Location,
    Manifest,
    block_damages,
    damage_of,
    medium_of,
    read_file,
    reading,
    unreadable,
)

_TASK_BLOCKS = 8
"""Blocks next to each other that one thread reads."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Piece:
    """Bytes of one file, and the tensor that they fill."""

    file: str
    start: int
    dtype: torch.dtype
    """Of the values on the disk."""
    target: torch.Tensor
    """One-dimensional and contiguous."""

    @property
    def stop(self) -> int:
        """One past the last byte on the disk."""
        return self.start + self.target.numel() * self.dtype.itemsize

    @property
    def blocks(self) -> range:
        """The blocks that it lies in."""
        return range(self.start // BLOCK_BYTES, -(-self.stop // BLOCK_BYTES))

    @property
    def is_direct(self) -> bool:
        """Whether the tensor takes the bytes as they are, where they are."""
        return self.target.dtype == self.dtype and self.target.device.type == "cpu"

    def within(self, span: range) -> range:
        """Those of its bytes on the disk that are in ``span``."""
        return range(max(self.start, span.start), min(self.stop, span.stop))

    def memory(self, span: range) -> memoryview:
        """Where the bytes in ``span`` go."""
        part = self.within(span)
        return memory_of(self.target)[part.start - self.start : part.stop - self.start]

    def take(self, memory: torch.Tensor, span: range) -> None:
        """Take what is in ``memory``, which begins with the bytes in ``span``."""
        part, size = self.within(span), self.dtype.itemsize
        values = memory[part.start - span.start : part.stop - span.start].view(self.dtype)
        first, last = (part.start - self.start) // size, (part.stop - self.start) // size
        self.target[first:last].copy_(values)


class CheckpointReader:
    """One checkpoint's global tensors, read by rows; for this process alone."""

    def __init__(self, path: Location) -> None:
        """Read the index; raises WorkError where manifest or index are damaged."""
        self._path = path
        self.manifest = Manifest.read(path)
        """What the folder must hold."""
        if INDEX_NAME not in self.manifest.files:
            raise WorkError(f"{path} has no {INDEX_NAME}.")
        problems = block_damages(path, self.manifest, {INDEX_NAME: None})
        if problems:
            raise _damaged(path, problems[0])
        self.keys: dict[str, Stored] = read_index(read_file(path / INDEX_NAME))
        """What every key stands for."""

    @property
    def files(self) -> set[str]:
        """Names of the files that hold values."""
        tensors = (stored for stored in self.keys.values() if isinstance(stored, StoredTensor))
        blobs = (stored for stored in self.keys.values() if isinstance(stored, StoredBlob))
        return {c.file for t in tensors for c in t.chunks} | {blob.file for blob in blobs}

    def path(self, key: str) -> tuple[str, ...]:
        """Parts of a key."""
        return self.keys[key].path

    def fill(self, entries: Sequence[Entry], *, sharers: int = 1) -> None:
        """Read the rows of each entry into ``entry.local``, converting between float formats.

        ``sharers`` processes of this host do so at the same time, and share its cores. Every block
        of which a byte is taken is checked as it is read. Raises WorkError at the first
        that is not as it was written; some of what was read is in its place by then.
        """
        targets = [
            entry.local
            if entry.local.is_contiguous()
            else torch.empty_like(entry.local).contiguous()
            for entry in entries
        ]
        pieces = [
            piece
            for entry, target in zip(entries, targets, strict=True)
            for piece in self._pieces(entry, target)
        ]
        num_readers = medium_of(self._path).num_readers(sharers)
        with ThreadPoolExecutor(max_workers=num_readers) as pool:
            for done in [pool.submit(self._read, *task) for task in _tasks(pieces)]:
                done.result()
        for entry, target in zip(entries, targets, strict=True):
            if target is not entry.local:
                entry.local.copy_(target)

    def tensor(self, key: str) -> torch.Tensor:
        """One whole tensor, in its dtype on the disk."""
        entry = self.entry(key)
        self.fill([entry])
        return entry.local

    def entry(self, key: str, *, device: str = "cpu") -> Entry:
        """One whole tensor without its values yet."""
        stored = self.keys[key]
        assert isinstance(stored, StoredTensor)
        value = torch.empty(stored.shape, dtype=stored.dtype, device=device)
        return Entry(path=stored.path, shape=stored.shape, row_start=0, local=value)

    def value(self, key: str) -> Any:
        """What is no tensor; raises WorkError where it is damaged."""
        return unpack(self.blob(key))

    def blob(self, key: str) -> bytes:
        """The bytes of what is no tensor; raises WorkError where they are damaged."""
        stored = self.keys[key]
        assert isinstance(stored, StoredBlob)
        data = torch.empty(stored.num_bytes, dtype=torch.uint8)
        piece = _Piece(file=stored.file, start=stored.start, dtype=torch.uint8, target=data)
        self._read(stored.file, {block: [piece] for block in piece.blocks})
        return bytes(memory_of(data))

    def _pieces(self, entry: Entry, target: torch.Tensor) -> Iterator[_Piece]:
        """The bytes that an entry takes, chunk by chunk."""
        stored = self.keys[entry.key]
        assert isinstance(stored, StoredTensor)
        flat = target.detach().reshape(-1)
        row_numel = stored.shape[1:].numel()
        first = entry.row_start
        stop = first + (entry.local.shape[0] if entry.shape else 1)
        for chunk in stored.chunks:
            start, end = max(first, chunk.row_start), min(stop, chunk.row_stop)
            if start < end:
                yield _Piece(
                    file=chunk.file,
                    start=chunk.start + (start - chunk.row_start) * stored.row_bytes,
                    dtype=stored.dtype,
                    target=flat[(start - first) * row_numel : (end - first) * row_numel],
                )

    def _read(self, file: str, blocks: Mapping[int, Sequence[_Piece]]) -> None:
        """Read some blocks of a file, check them, and hand their bytes to the pieces."""
        path, record = self._path / file, self.manifest.files[file]
        scratch = torch.empty(BLOCK_BYTES, dtype=torch.uint8)
        try:
            with reading(path, record) as reader:
                for block, pieces in blocks.items():
                    span = record.span(block)
                    direct, others = _parted(pieces)
                    memories = _memories(direct, span, memory_of(scratch))
                    if not reader.read(block, memories):
                        raise _damaged(self._path, damage_of(path, record, block))
                    for piece in others:
                        piece.take(scratch, span)
        except OSError as error:
            damage = Damage(file=path, problem=unreadable(path, error))
            raise _damaged(self._path, damage) from error


def _tasks(pieces: Sequence[_Piece]) -> Iterator[tuple[str, dict[int, list[_Piece]]]]:
    """Some blocks of one file, with the pieces that lie in each, for one thread at a time."""
    files: dict[str, dict[int, list[_Piece]]] = {}
    for piece in pieces:
        for block in piece.blocks:
            files.setdefault(piece.file, {}).setdefault(block, []).append(piece)
    for file, blocks in files.items():
        for _, numbers in groupby(sorted(blocks), lambda number: number // _TASK_BLOCKS):
            yield file, {number: blocks[number] for number in numbers}


def _parted(pieces: Sequence[_Piece]) -> tuple[list[_Piece], list[_Piece]]:
    """The pieces of a block that can be read in place, in their order in the file; the others."""
    found = sorted(pieces, key=lambda piece: piece.start)
    if any(before.stop > after.start for before, after in pairwise(found)):
        return [], found  # bytes that several take are read once
    return [p for p in found if p.is_direct], [p for p in found if not p.is_direct]


def _memories(direct: Sequence[_Piece], span: range, scratch: memoryview) -> list[memoryview]:
    """Where the bytes of a block go: to the pieces, and what none takes in place to ``scratch``."""
    memories, at = [], span.start
    for piece in direct:
        part = piece.within(span)
        memories += [scratch[at - span.start : part.start - span.start], piece.memory(span)]
        at = part.stop
    memories.append(scratch[at - span.start : len(span)])
    return [memory for memory in memories if memory]


def _damaged(path: Location, damage: Damage) -> WorkError:
    return WorkError(f"{damage}: {path} is damaged. Load another step.")
