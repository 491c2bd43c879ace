"""Files that are counted and summed as they are written, flushed to the disk, and read in blocks.

A file is under one checksum for each block of ``BLOCK_BYTES``, so that whoever reads a range checks
that range alone, in any number of threads. The checksum is XXH3 (64 bits), which keeps up with
memory and so costs a load next to nothing; SHA-256 takes nine times as long here, and even zlib's
CRC-32 four times. It finds accidents, a flipped bit or a lost page, and slips once in 2^64. SHA-256
guards the manifest, and so the sums.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

import xxhash

from shoal.errors import WorkError

BLOCK_BYTES = 4 * 2**20
"""Bytes under one checksum; part of the format."""

WRITE_BYTES = 4 * BLOCK_BYTES
"""What one write takes at most, so that whoever waits between two of them is heard."""

_DIGITS = 16


class Buffer(Protocol):
    """Whatever gives its bytes to ``memoryview``."""

    def __buffer__(self, flags: int, /) -> memoryview: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """What a file must be to be whole."""

    num_bytes: int
    """Its size."""

    xxh3: str
    """XXH3 of each block in turn, sixteen hexadecimal digits each."""

    @property
    def num_blocks(self) -> int:
        """Blocks; the last may be short."""
        return -(-self.num_bytes // BLOCK_BYTES)

    @property
    def is_consistent(self) -> bool:
        """Whether there is a checksum for each block."""
        return len(self.xxh3) == _DIGITS * self.num_blocks

    def matches(self, block: int, data: Buffer) -> bool:
        """Whether ``data`` is what was written as block number ``block``."""
        return self.xxh3[_DIGITS * block : _DIGITS * (block + 1)] == _sum(data)


class NewFile:
    """A new file under way; short writes are taken to their end."""

    def __init__(self, path: Path, between: Callable[[], None] | None = None) -> None:
        """``between`` is called between two writes, and may raise to give up."""
        self._path = path
        self._between = between
        self._sums: list[str] = []
        self._num_bytes = 0
        self._block = memoryview(bytearray(BLOCK_BYTES))
        self._held = 0
        self._summer = ThreadPoolExecutor(max_workers=1)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)

    def write(self, data: Buffer) -> int:
        """Append all of ``data``; the number of its bytes. What fills no block is held back."""
        view = memoryview(data).cast("B")
        start = 0
        if self._held:
            start = self._hold(view)
        while len(view) - start >= BLOCK_BYTES:
            stop = start + min(WRITE_BYTES, (len(view) - start) // BLOCK_BYTES * BLOCK_BYTES)
            self._emit(view[start:stop])
            start = stop
        self._hold(view[start:])
        return len(view)

    def _hold(self, view: memoryview) -> int:
        """Keep what there is room for until the block is full; how much that was."""
        taken = min(len(view), BLOCK_BYTES - self._held)
        self._block[self._held : self._held + taken] = view[:taken]
        self._held += taken
        if self._held == BLOCK_BYTES:
            self._emit(self._block)
            self._held = 0
        return taken

    def _emit(self, view: memoryview) -> None:
        """Write whole blocks, or the file's end, while another thread sums them."""
        if self._between is not None:
            self._between()
        summed = self._summer.submit(_sums, view)
        try:
            sent = 0
            while sent < len(view):
                sent += os.write(self._descriptor, view[sent:])
            _start_writeback(self._descriptor, self._num_bytes, sent)
        finally:
            self._sums += summed.result()  # the memory is the caller's again
        self._num_bytes += sent

    def tell(self) -> int:
        """Bytes so far."""
        return self._num_bytes + self._held

    def finish(self, *, flush: bool = True) -> FileRecord:
        """Flush to the disk and check that the disk holds as many bytes as were written.

        Without ``flush``, that is left to ``flush_files``.
        """
        if self._held:
            self._emit(self._block[: self._held])
            self._held = 0
        if flush:
            os.fsync(self._descriptor)
        held = os.fstat(self._descriptor).st_size
        if held != self._num_bytes:
            raise WorkError(
                f"{self._path}: {self._num_bytes} bytes were written and the disk holds {held}."
            )
        return FileRecord(num_bytes=self._num_bytes, xxh3="".join(self._sums))

    def close(self) -> None:
        """Give thread and descriptor back."""
        self._summer.shutdown()
        os.close(self._descriptor)


@contextmanager
def creating(path: Path, between: Callable[[], None] | None = None) -> Iterator[NewFile]:
    """A new file at ``path``; raises WorkError that names path and cause where the system refuses.

    Call ``finish`` inside the block.
    """
    with refusals(path):
        file = NewFile(path, between)
        try:
            yield file
        finally:
            file.close()


def write_file(path: Path, data: bytes) -> FileRecord:
    """Write a whole new file, and leave it to ``flush_files`` to make it last."""
    with creating(path) as file:
        file.write(data)
        return file.finish(flush=False)


class BlockReader:
    """Reads blocks of a file one at a time; a context manager."""

    def __init__(self, path: Path, record: FileRecord, memory: memoryview) -> None:
        """``memory`` has room for a block and holds the last one read. Raises ``OSError``."""
        self._record = record
        self._memory = memory
        self._descriptor = os.open(path, os.O_RDONLY)

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def read(self, number: int) -> bool:
        """Read a block; whether it is as it was written. Raises ``OSError``."""
        start = number * BLOCK_BYTES
        wanted = min(BLOCK_BYTES, self._record.num_bytes - start)
        held = 0
        while held < wanted:
            got = os.preadv(self._descriptor, [self._memory[held:wanted]], start + held)
            if not got:
                return False
            held += got
        return self._record.matches(number, self._memory[:held])


def flush_files(paths: Iterable[Path]) -> None:
    """Make files last that were written without. The first flush takes most of the rest along."""
    for path in paths:
        with refusals(path):
            _flush(path, os.O_RDONLY)


def flush_folder(folder: Path) -> None:
    """Make the names in a folder last."""
    _flush(folder, os.O_RDONLY | os.O_DIRECTORY)


def _flush(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def refusals(path: Path) -> Iterator[None]:
    """Turn what the system refuses about ``path`` into a WorkError that names path and cause."""
    try:
        yield
    except OSError as error:
        raise WorkError(f"{path} could not be written: {error.strerror or error}.") from error


def _start_writeback(descriptor: int, start: int, num_bytes: int) -> None:
    """Have the disk begin with these bytes, so that the flush at the end finds little to do."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, start, num_bytes, os.POSIX_FADV_DONTNEED)


def _sums(view: memoryview) -> list[str]:
    return [_sum(view[start : start + BLOCK_BYTES]) for start in range(0, len(view), BLOCK_BYTES)]


def _sum(data: Buffer) -> str:
    return xxhash.xxh3_64_hexdigest(data)
