"""Reading rows out of a checkpoint's files: just the bytes of the rows that are wanted."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint.entry import Entry
from shoal.checkpoint.index import INDEX_NAME, Stored, StoredBlob, StoredTensor, read_index
from shoal.checkpoint.shard import memory_of, unpack
from shoal.errors import WorkError
from shoal.storage import BLOCK_BYTES, Damage, Manifest, block_damages, num_threads

_PIECE_BYTES = 16 * 2**20
"""What a thread reads at a time, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """Bytes of one file, and the tensor that they fill."""

    file: str
    start: int
    dtype: torch.dtype
    """Of the values on the disk."""
    target: torch.Tensor
    """One-dimensional and contiguous."""

    @property
    def num_bytes(self) -> int:
        """Bytes on the disk."""
        return self.target.numel() * self.dtype.itemsize


class CheckpointReader:
    """One checkpoint's global tensors, read by rows; for this process alone."""

    def __init__(self, path: Path) -> None:
        """Read the index; raises WorkError where manifest or index are damaged."""
        self._path = path
        self._manifest = Manifest.read(path)
        if INDEX_NAME not in self._manifest.files:
            raise WorkError(f"{path} has no {INDEX_NAME}.")
        problems = block_damages(path, self._manifest, {INDEX_NAME: None})
        if problems:
            raise WorkError(f"{problems[0]}: {path} is damaged. Load another step.")
        self.keys: dict[str, Stored] = read_index((path / INDEX_NAME).read_bytes())
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

    def damages(self, entries: Sequence[Entry], blobs: Sequence[str]) -> tuple[Damage, ...]:
        """Check every block of which ``fill`` or ``value`` would read a byte."""
        ranges = [
            (piece.file, piece.start, piece.num_bytes)
            for entry in entries
            for piece in self._pieces(entry)
        ]
        for key in blobs:
            blob = self._blob(key)
            ranges.append((blob.file, blob.start, blob.num_bytes))
        blocks: dict[str, set[int] | None] = {}
        for file, start, num_bytes in ranges:
            known = blocks.setdefault(file, set())
            assert known is not None
            known.update(range(start // BLOCK_BYTES, -(-(start + num_bytes) // BLOCK_BYTES)))
        return block_damages(self._path, self._manifest, blocks)

    def fill(self, entries: Sequence[Entry]) -> None:
        """Read the rows of each entry into ``entry.local``, converting between float formats."""
        scattered = [entry for entry in entries if not entry.local.is_contiguous()]
        copies = [
            torch.empty(e.local.shape, dtype=e.local.dtype, device=e.local.device)
            for e in scattered
        ]
        pieces = [
            piece
            for entry in entries
            if entry.local.is_contiguous()
            for piece in self._pieces(entry)
        ]
        for entry, copy in zip(scattered, copies, strict=True):
            pieces += self._pieces(entry, copy)
        with ThreadPoolExecutor(max_workers=num_threads()) as pool:
            for done in [pool.submit(self._read, group) for group in _grouped(pieces)]:
                done.result()
        for entry, copy in zip(scattered, copies, strict=True):
            entry.local.copy_(copy)

    def tensor(self, key: str) -> torch.Tensor:
        """One whole tensor, in its dtype on the disk."""
        entry = self.entry(key)
        self.fill([entry])
        return entry.local

    def entry(self, key: str) -> Entry:
        """One whole tensor without its values yet."""
        stored = self.keys[key]
        assert isinstance(stored, StoredTensor)
        value = torch.empty(stored.shape, dtype=stored.dtype)
        return Entry(path=stored.path, shape=stored.shape, row_start=0, local=value)

    def value(self, key: str) -> Any:
        """What is no tensor."""
        blob = self._blob(key)
        with (self._path / blob.file).open("rb") as file:
            file.seek(blob.start)
            return unpack(file.read(blob.num_bytes))

    def _blob(self, key: str) -> StoredBlob:
        stored = self.keys[key]
        assert isinstance(stored, StoredBlob)
        return stored

    def _pieces(self, entry: Entry, target: torch.Tensor | None = None) -> Iterator[_Piece]:
        """The bytes that an entry takes, in parts of at most ``_PIECE_BYTES``."""
        stored = self.keys[entry.key]
        assert isinstance(stored, StoredTensor)
        flat = (entry.local if target is None else target).detach().reshape(-1)
        row_numel = stored.shape[1:].numel()
        first = entry.row_start
        stop = first + (entry.local.shape[0] if entry.shape else 1)
        step = _PIECE_BYTES // stored.dtype.itemsize
        for chunk in stored.chunks:
            start, end = max(first, chunk.row_start), min(stop, chunk.row_stop)
            place = chunk.start + (start - chunk.row_start) * stored.row_bytes
            for element in range(0, (end - start) * row_numel, step):
                begin = (start - first) * row_numel + element
                until = min(begin + step, (end - first) * row_numel)
                yield _Piece(
                    file=chunk.file,
                    start=place + element * stored.dtype.itemsize,
                    dtype=stored.dtype,
                    target=flat[begin:until],
                )

    def _read(self, pieces: Sequence[_Piece]) -> None:
        """Fill the targets of pieces of one file."""
        path = self._path / pieces[0].file
        descriptor = os.open(path, os.O_RDONLY)
        try:
            for piece in pieces:
                target = piece.target
                in_place = target.dtype == piece.dtype and target.device.type == "cpu"
                values = target if in_place else torch.empty(target.shape, dtype=piece.dtype)
                _read_into(descriptor, path, piece.start, values)
                if not in_place:
                    target.copy_(values)
        finally:
            os.close(descriptor)


def _read_into(descriptor: int, path: Path, start: int, values: torch.Tensor) -> None:
    memory = memory_of(values)
    held = 0
    while held < len(memory):
        got = os.preadv(descriptor, [memory[held:]], start + held)
        if not got:
            raise WorkError(f"{path} ends before byte {start + len(memory)}.")
        held += got


def _grouped(pieces: Sequence[_Piece]) -> Iterator[list[_Piece]]:
    """Pieces of one file, one after another, of about ``_PIECE_BYTES`` together."""
    group: list[_Piece] = []
    held = 0
    for piece in sorted(pieces, key=lambda piece: (piece.file, piece.start)):
        if group and (piece.file != group[0].file or held + piece.num_bytes > _PIECE_BYTES):
            yield group
            group, held = [], 0
        group.append(piece)
        held += piece.num_bytes
    if group:
        yield group
