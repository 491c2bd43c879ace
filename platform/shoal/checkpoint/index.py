"""The index of a checkpoint: which rows of which tensor lie in which bytes of which file.

``index.json`` says it in plain values, so that a reader needs neither pickles nor torch's frames,
and takes the bytes of just the rows it wants, from a disk or by ranges from an object store:

    {"model.norm.weight": {"path": ["model", "norm.weight"], "dtype": "float32", "shape": [66],
                           "chunks": [[0, 40, "__0_0.distcp", 704], [40, 66, "__1_0.distcp", 704]]},
     "counters": {"path": ["counters"], "blob": ["__0_0.distcp", 4096, 900]}}

A chunk is first row, row past the last, file, and first byte; a scalar has one row. A blob is file,
first byte and number of bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from shoal.checkpoint.shard import Placed, Shard
from shoal.errors import WorkError

INDEX_NAME = "index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Some rows of a tensor in a file."""

    row_start: int
    row_stop: int
    file: str
    start: int
    """First byte of the values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A whole tensor."""

    path: tuple[str, ...]
    """Parts of the key."""

    dtype: torch.dtype
    shape: torch.Size
    chunks: tuple[Chunk, ...]
    """In the order of their rows, without gap or overlap."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a row; of the whole scalar."""
        return self.shape[1:].numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBlob:
    """A value that is no tensor."""

    path: tuple[str, ...]
    """Parts of the key."""

    file: str
    start: int
    num_bytes: int


Stored = StoredTensor | StoredBlob
"""What a key stands for."""


def index_of(shards: Sequence[Shard]) -> dict[str, Stored]:
    """The index of what the ranks write.

    Raises WorkError where ranks disagree about a tensor, or the chunks do not tile it exactly.
    """
    found: dict[str, list[tuple[str, Placed]]] = {}
    for shard in shards:
        for placed in shard.placed:
            found.setdefault(".".join(placed.path), []).append((shard.name, placed))
    return {key: _stored(key, parts) for key, parts in found.items()}


def write_index(index: Mapping[str, Stored]) -> bytes:
    """The index as a file."""
    return json.dumps({key: _fields(stored) for key, stored in index.items()}).encode()


def read_index(data: bytes) -> dict[str, Stored]:
    """The index that a file holds."""
    return {key: _of_fields(fields) for key, fields in json.loads(data).items()}


def _stored(key: str, parts: Sequence[tuple[str, Placed]]) -> Stored:
    file, first = parts[0]
    for _, part in parts:
        if part.path != first.path:
            raise WorkError(f"{key} names two things: {first.path} and {part.path}.")
        if (part.shape, part.dtype) != (first.shape, first.dtype):
            raise WorkError(f"{key} is {_told(first)} on one rank and {_told(part)} on another.")
    if first.shape is None or first.dtype is None:
        return StoredBlob(path=first.path, file=file, start=first.start, num_bytes=first.num_bytes)
    chunks = [
        Chunk(
            row_start=part.row_start,
            row_stop=part.row_start + (part.sizes[0] if part.shape else 1),
            file=name,
            start=part.values,
        )
        for name, part in parts
    ]
    chunks.sort(key=lambda chunk: (chunk.row_start, chunk.row_stop))
    _check_tiling(key, first.shape, chunks)
    for _, part in parts:
        if part.sizes[1:] != first.shape[1:]:
            raise WorkError(f"{key}: rows of {tuple(part.sizes)} are no rows of {_told(first)}.")
    return StoredTensor(path=first.path, dtype=first.dtype, shape=first.shape, chunks=tuple(chunks))


def _check_tiling(key: str, shape: torch.Size, chunks: Sequence[Chunk]) -> None:
    """Each must begin where the one before it ends."""
    num_rows = shape[0] if shape else 1
    edges = [(0, 0), *((c.row_start, c.row_stop) for c in chunks), (num_rows, num_rows)]
    for (_, stop), (start, _) in pairwise(edges):
        if start != stop:
            trouble = "no rank wrote" if start > stop else "two ranks wrote"
            rows = f"{min(start, stop)} to {max(start, stop)}"
            raise WorkError(f"{key}: {trouble} rows {rows} of {num_rows}.")


def _told(placed: Placed) -> str:
    return f"{tuple(placed.shape or ())} {placed.dtype}"


def _fields(stored: Stored) -> dict[str, Any]:
    if isinstance(stored, StoredBlob):
        return {"path": stored.path, "blob": (stored.file, stored.start, stored.num_bytes)}
    return {
        "path": stored.path,
        "dtype": str(stored.dtype).removeprefix("torch."),
        "shape": tuple(stored.shape),
        "chunks": [(c.row_start, c.row_stop, c.file, c.start) for c in stored.chunks],
    }


def _of_fields(fields: Mapping[str, Any]) -> Stored:
    path = tuple(fields["path"])
    if "blob" in fields:
        file, start, num_bytes = fields["blob"]
        return StoredBlob(path=path, file=file, start=start, num_bytes=num_bytes)
    return StoredTensor(
        path=path,
        dtype=getattr(torch, fields["dtype"]),
        shape=torch.Size(fields["shape"]),
        chunks=tuple(
            Chunk(row_start=first, row_stop=stop, file=file, start=start)
            for first, stop, file, start in fields["chunks"]
        ),
    )
