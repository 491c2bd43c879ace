"""One rank's file of a checkpoint, and the DCP metadata that ties all ranks' files together.

A rank writes its entries one after the other, each as ``torch.save`` writes a tensor, which is what
DCP's reader expects at an offset of a file. The metadata then says for every global tensor which
rows lie where. Chunks are explicit: the shards of a flat buffer are uneven, and DCP would otherwise
take them for even ones (and the sizes would still add up).
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.serialization import get_crc32_options, set_crc32_options

from shoal.checkpoint.entry import Entry
from shoal.checkpoint.files import FileRecord, HashingFile, creating
from shoal.errors import WorkError

CHUNK_BYTES = 64 * 2**20
"""Larger entries are written in several chunks: what is copied to write them, and read to get at a
few of their rows, stays within this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """A value that is no tensor, in the bytes that ``torch.save`` makes of it."""

    path: tuple[str, ...]
    """Parts of the key."""

    data: bytes
    """The bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Where a written entry or blob lies."""

    path: tuple[str, ...]
    """Parts of the key."""

    shape: torch.Size | None
    """Shape of the whole tensor; unset for a blob."""

    dtype: torch.dtype | None
    """Element type; unset for a blob."""

    chunk: ChunkStorageMetadata | None
    """The rows; unset for a blob."""

    file: str
    """Name of the file in the checkpoint's folder."""

    offset: int
    """First byte in the file."""

    num_bytes: int
    """Bytes in the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """What one rank wrote."""

    name: str
    """Name of the file."""

    record: FileRecord
    """Size and hash of the file."""

    placed: tuple[Placed, ...]
    """What lies in it."""


def pack(path: tuple[str, ...], value: object) -> Blob:
    """Turn a value into bytes; refuses with WorkError what could not be read back safely.

    Plain values, containers and tensors can be: nothing that runs code on reading.
    """
    _refuse_unsafe(".".join(path), value)
    stream = io.BytesIO()
    torch.save(value, stream)
    return Blob(path=path, data=stream.getvalue())


def _refuse_unsafe(key: str, value: object) -> None:
    """Look at the types themselves: what the unpickler takes grows with what others imported."""
    if isinstance(value, dict):
        for name, item in value.items():
            _refuse_unsafe(key, name)
            _refuse_unsafe(f"{key}.{name}", item)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _refuse_unsafe(f"{key}.{index}", item)
    elif type(value) not in (torch.Tensor, str, bytes, int, float, bool, type(None)):
        raise WorkError(
            f"{key} holds what a checkpoint cannot keep, a {type(value).__name__}: give plain "
            "values, tensors, and lists, tuples and dicts of them."
        )


def unpack(data: bytes) -> Any:
    """The value of a blob."""
    return torch.load(io.BytesIO(data), weights_only=True)


def write_shard(folder: Path, rank: int, entries: Sequence[Entry], blobs: Sequence[Blob]) -> Shard:
    """Write one rank's file and flush it to the disk.

    Raises WorkError that names the file and the cause where the system refuses.
    """
    name = f"__{rank}_0.distcp"
    placed = []
    with creating(folder / name) as file, _without_crc32():
        for blob in blobs:
            offset = file.tell()
            file.write(blob.data)
            placed.append(_placed(blob.path, None, name, offset, file))
        for chunk in (chunk for entry in entries for chunk in _chunks(entry)):
            offset = file.tell()
            # A copy of its own: torch.save would write all of the flat buffer that this views.
            torch.save(chunk.local.to("cpu", copy=True).contiguous(), cast(IO[bytes], file))
            placed.append(_placed(chunk.path, chunk, name, offset, file))
        return Shard(name=name, record=file.finish(), placed=tuple(placed))


def metadata_of(shards: Sequence[Shard]) -> Metadata:
    """DCP's metadata of all that was written.

    Raises WorkError where ranks disagree about a tensor, or the chunks do not tile it exactly.
    """
    keys: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    paths: dict[str, tuple[str, ...]] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for placed in (placed for shard in shards for placed in shard.placed):
        key = ".".join(placed.path)
        if paths.setdefault(key, placed.path) != placed.path:
            raise WorkError(f"{key} names two things: {paths[key]} and {placed.path}.")
        storage[_index(key, placed)] = _StorageInfo(placed.file, placed.offset, placed.num_bytes)
        _add_chunk(keys, key, placed)
    for key, value in keys.items():
        if isinstance(value, TensorStorageMetadata):
            _check_tiling(key, value)
    return Metadata(
        state_dict_metadata=keys,
        planner_data=paths,
        storage_data=storage,
        storage_meta=StorageMeta(),
        version=CURRENT_DCP_VERSION,
    )


def _chunks(entry: Entry) -> Iterator[Entry]:
    """An entry in runs of rows of at most ``CHUNK_BYTES``, or of one row."""
    if not entry.shape:
        yield entry
        return
    num_rows = entry.local.shape[0]
    rows = max(1, CHUNK_BYTES // max(1, entry.local.nbytes // num_rows))
    for start in range(0, num_rows, rows):
        part = entry.local[start : start + rows]
        yield replace(entry, row_start=entry.row_start + start, local=part)


@contextmanager
def _without_crc32() -> Iterator[None]:
    """The file is under SHA-256; the zip's own CRC-32 takes ten times as long as the writing."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


def _placed(
    path: tuple[str, ...], entry: Entry | None, name: str, offset: int, file: HashingFile
) -> Placed:
    return Placed(
        path=path,
        shape=entry.shape if entry else None,
        dtype=entry.local.dtype if entry else None,
        chunk=entry.chunk if entry else None,
        file=name,
        offset=offset,
        num_bytes=file.tell() - offset,
    )


def _index(key: str, placed: Placed) -> MetadataIndex:
    return MetadataIndex(key, placed.chunk.offsets if placed.chunk else None)


def _add_chunk(
    keys: dict[str, TensorStorageMetadata | BytesStorageMetadata], key: str, placed: Placed
) -> None:
    if placed.chunk is None:
        keys[key] = BytesStorageMetadata()
        return
    assert placed.shape is not None and placed.dtype is not None
    tensor = keys.setdefault(
        key,
        TensorStorageMetadata(
            properties=TensorProperties(dtype=placed.dtype), size=placed.shape, chunks=[]
        ),
    )
    assert isinstance(tensor, TensorStorageMetadata)
    if tensor.size != placed.shape or tensor.properties.dtype != placed.dtype:
        raise WorkError(
            f"{key} is {tuple(tensor.size)} {tensor.properties.dtype} on one rank and "
            f"{tuple(placed.shape)} {placed.dtype} on another."
        )
    tensor.chunks.append(placed.chunk)


def _check_tiling(key: str, tensor: TensorStorageMetadata) -> None:
    """Chunks are dim-0 rows: in order, each must begin where the one before it ends."""
    if not tensor.size:
        if len(tensor.chunks) != 1:
            raise WorkError(f"{key} is a scalar that {len(tensor.chunks)} ranks wrote.")
        return
    bounds = sorted(
        (chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0]) for chunk in tensor.chunks
    )
    edges = [(0, 0), *bounds, (tensor.size[0], tensor.size[0])]
    for (_, stop), (start, _) in pairwise(edges):
        if start != stop:
            trouble = "no rank wrote" if start > stop else "two ranks wrote"
            rows = f"{min(start, stop)} to {max(start, stop)}"
            raise WorkError(f"{key}: {trouble} rows {rows} of {tensor.size[0]}.")
    volume = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
    if volume != tensor.size.numel():
        raise WorkError(f"{key}: {volume} of its {tensor.size.numel()} elements were written.")
