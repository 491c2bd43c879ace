"""One rank's file of a checkpoint, byte for byte, before any value is in it.

    tensor   framed as ``torch.save`` frames it, which is what DCP's reader expects
    tensor   ...
    blob     a value that is no tensor

All values start at multiples of ``ALIGNMENT``.
The frames depend on shapes and dtypes alone. So a layout is made once and serves every save of the
same state, and saving means to copy values to their places.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import IO, Any, cast

import torch
from torch.serialization import get_crc32_options, set_crc32_options, skip_data

from shoal.checkpoint.entry import Entry
from shoal.errors import WorkError
from shoal.storage import Buffer, FileRecord, Location, creating

CHUNK_BYTES = 64 * 2**20
"""Larger tensors are written in several chunks of rows, so that no reader must take them whole."""

ALIGNMENT = 64
"""Bytes; what ``torch.save`` aligns values to inside a frame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """A value that is no tensor, in the bytes that ``torch.save`` makes of it."""

    path: tuple[str, ...]
    """Parts of the key."""

    data: bytes
    """The bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Where some rows of a tensor, or a blob, lie in a file."""

    path: tuple[str, ...]
    """Parts of the key."""

    shape: torch.Size | None
    """Shape of the whole tensor; unset for a blob."""

    dtype: torch.dtype | None
    """Element type; unset for a blob."""

    row_start: int
    """First dim-0 row; 0 for a scalar and a blob."""

    sizes: torch.Size
    """Shape of the rows; empty for a scalar and a blob."""

    start: int
    """First byte of the frame, or of the blob."""

    num_bytes: int
    """Bytes of the frame, or of the blob."""

    values: int
    """First byte of the values; ``start`` for a blob."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """What one rank writes."""

    name: str
    """Name of the file."""

    placed: tuple[Placed, ...]
    """What lies in it, in order."""

    num_bytes: int
    """Size of the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Where some rows of one entry go."""

    entry: int
    """The entry's index."""

    rows: slice | None
    """Of the entry's local rows; unset for a scalar."""

    start: int
    """First byte in the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A rank's file without the values of its tensors."""

    key: tuple[object, ...]
    """Equal for equal files, values apart."""

    shard: Shard
    """What the others are told of it."""

    slots: tuple[Slot, ...]
    """Where values go, in order."""

    frames: tuple[tuple[int, bytes], ...]
    """Everything else: where, and which bytes, in order."""


def layout_key(entries: Sequence[Entry], blobs: Sequence[Blob]) -> tuple[object, ...]:
    """What a layout depends on."""
    return (
        *((e.path, e.row_start, e.local.shape, e.local.dtype, e.shape) for e in entries),
        *((blob.path, len(blob.data)) for blob in blobs),
    )


def lay_out(rank: int, entries: Sequence[Entry], blobs: Sequence[Blob]) -> Layout:
    """Lay out one rank's file. Blobs come last; their bytes are among the frames' at the end."""
    placed: list[Placed] = []
    slots: list[Slot] = []
    frames: list[tuple[int, bytes]] = []
    end = 0
    for index, entry in enumerate(entries):
        for rows, sizes in _chunks(entry):
            head, tail = _frame(sizes, entry.local.dtype)
            start = -(-end // ALIGNMENT) * ALIGNMENT
            values = start + len(head)
            tail_start = values + sizes.numel() * entry.local.dtype.itemsize
            frames += [(end, bytes(start - end) + head), (tail_start, tail)]
            end = tail_start + len(tail)
            slots.append(Slot(entry=index, rows=rows, start=values))
            placed.append(
                Placed(
                    path=entry.path,
                    shape=entry.shape,
                    dtype=entry.local.dtype,
                    row_start=entry.row_start + (rows.start if rows else 0),
                    sizes=sizes,
                    start=start,
                    num_bytes=end - start,
                    values=values,
                )
            )
    for blob in blobs:
        placed.append(_placed_blob(blob, end))
        end += len(blob.data)
    shard = Shard(name=f"__{rank}_0.distcp", placed=tuple(placed), num_bytes=end)
    return Layout(
        key=layout_key(entries, blobs), shard=shard, slots=tuple(slots), frames=tuple(frames)
    )


def values_of(layout: Layout, entries: Sequence[Entry]) -> list[torch.Tensor]:
    """The live tensors that go into the slots, in their order."""
    return [
        entries[slot.entry].local if slot.rows is None else entries[slot.entry].local[slot.rows]
        for slot in layout.slots
    ]


def write_shard(
    folder: Location, layout: Layout, values: Iterable[torch.Tensor], blobs: Sequence[Blob]
) -> FileRecord:
    """Write one rank's file and flush it to the disk; ``values`` go into the slots, in their order.

    Raises WorkError that names the file and the cause where the system refuses.
    """
    with creating(folder / layout.shard.name) as file:
        frames = iter(layout.frames)
        for value in values:
            file.write(next(frames)[1])
            file.write(memory_of(value.to("cpu")))
            file.write(next(frames)[1])
        for blob in blobs:
            file.write(blob.data)
        return file.finish()


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor on the CPU; its own memory where that is contiguous."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return memoryview(cast(Buffer, flat.numpy()))


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


def _chunks(entry: Entry) -> Iterator[tuple[slice | None, torch.Size]]:
    """An entry in runs of rows of at most ``CHUNK_BYTES``, or of one row, with their shapes."""
    if not entry.shape:
        yield None, entry.local.shape
        return
    num_rows = entry.local.shape[0]
    rows = max(1, CHUNK_BYTES // max(1, entry.local.nbytes // num_rows))
    for start in range(0, num_rows, rows):
        stop = min(start + rows, num_rows)
        yield slice(start, stop), torch.Size([stop - start, *entry.local.shape[1:]])


@lru_cache(maxsize=4096)
def _frame(sizes: torch.Size, dtype: torch.dtype) -> tuple[bytes, bytes]:
    """What ``torch.save`` writes before and after the values of such a tensor."""
    stream = _AroundValues()
    with _without_crc32(), skip_data():
        torch.save(torch.empty(sizes, dtype=dtype), cast(IO[bytes], stream))
    head, tail = stream.parts
    return bytes(head), bytes(tail)


class _AroundValues(io.RawIOBase):
    """Takes what ``torch.save`` writes; it leaves values out by going on behind them."""

    def __init__(self) -> None:
        self.parts = [bytearray()]

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.parts[-1] += data
        return memoryview(data).nbytes

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.parts.append(bytearray())
        return offset


@contextmanager
def _without_crc32() -> Iterator[None]:
    """The zip's own checksums would change with the values; the file is under those of blocks."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


def _placed_blob(blob: Blob, start: int) -> Placed:
    return Placed(
        path=blob.path,
        shape=None,
        dtype=None,
        row_start=0,
        sizes=torch.Size(),
        start=start,
        num_bytes=len(blob.data),
        values=start,
    )
