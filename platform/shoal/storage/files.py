"""Files that are counted and summed as they are written, and read in blocks, on any medium.

A file is under one checksum for each block of ``BLOCK_BYTES``, so that whoever reads a range checks
that range alone, in any number of threads. The checksum is XXH3 (64 bits), which keeps up with
memory and so costs a load next to nothing; SHA-256 takes nine times as long here, and even zlib's
CRC-32 four times. It finds accidents, a flipped bit or a lost page, and slips once in 2^64. SHA-256
guards the manifest, and so the sums.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import xxhash

from shoal.errors import Unavailable, WorkError
from shoal.storage.location import Location
from shoal.storage.media import medium_of
from shoal.storage.medium import Source

BLOCK_BYTES = 4 * 2**20
"""Bytes under one checksum; part of the format."""

WRITE_BYTES = 4 * BLOCK_BYTES
"""What one write takes at most, so that whoever waits between two of them is heard."""

_DIGITS = 16

_DAMAGES = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EIO)
"""What a file system answers where the file itself is at fault."""


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

    def span(self, block: int) -> range:
        """The bytes of the file that block number ``block`` is."""
        start = block * BLOCK_BYTES
        return range(start, min(start + BLOCK_BYTES, self.num_bytes))

    def is_sum(self, block: int, digits: str) -> bool:
        """Whether that is the checksum of block number ``block``."""
        return self.xxh3[_DIGITS * block : _DIGITS * (block + 1)] == digits


class NewFile:
    """A new file under way."""

    def __init__(self, path: Location, between: Callable[[], None] | None = None) -> None:
        """``between`` is called between two writes, and may raise to give up."""
        self._path = path
        self._between = between
        self._sums: list[str] = []
        self._num_bytes = 0
        self._block = memoryview(bytearray(BLOCK_BYTES))
        self._held = 0
        self._sink = medium_of(path).create(path)
        self._summer = ThreadPoolExecutor(max_workers=1)

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
            self._sink.write(view)
        finally:
            self._sums += summed.result()  # the memory is the caller's again
        self._num_bytes += len(view)

    def tell(self) -> int:
        """Bytes so far."""
        return self._num_bytes + self._held

    def finish(self, *, flush: bool = True) -> FileRecord:
        """Have it last, and check that the medium holds as many bytes as were written.

        Without ``flush``, the first is left to the step's publication.
        """
        if self._held:
            self._emit(self._block[: self._held])
            self._held = 0
        held = self._sink.finish(flush=flush)
        if held != self._num_bytes:
            raise WorkError(
                f"{self._path}: {self._num_bytes} bytes were written and {held} are there."
            )
        return FileRecord(num_bytes=self._num_bytes, xxh3="".join(self._sums))

    def close(self) -> None:
        """Give thread and file back."""
        self._summer.shutdown()
        self._sink.close()


@contextmanager
def creating(path: Location, between: Callable[[], None] | None = None) -> Iterator[NewFile]:
    """A new file at ``path``; raises WorkError that names path and cause where the system refuses.

    Call ``finish`` inside the block.
    """
    with refusals(path):
        file = NewFile(path, between)
        try:
            yield file
        finally:
            file.close()


def write_file(path: Location, data: bytes) -> FileRecord:
    """Write a whole new file, and leave it to the step's publication to make it last."""
    with creating(path) as file:
        file.write(data)
        return file.finish(flush=False)


class BlockReader:
    """Reads blocks of a file one at a time."""

    def __init__(self, source: Source, record: FileRecord) -> None:
        self._source = source
        self._record = record

    def read(self, number: int, memories: Sequence[memoryview]) -> bool:
        """Read a block into ``memories`` in turn, which are as long together.

        Whether it is as it was written; they hold what was read all the same. Raises ``OSError``.
        """
        span, digest = self._record.span(number), xxhash.xxh3_64()
        start, left = span.start, list(memories)
        while start < span.stop:
            got = self._source.read(start, _cut(left, self._source.piece_bytes)[0])
            if not got:
                return False
            start += got
            taken, left = _cut(left, got)
            for part in taken:
                digest.update(part)
        return self._record.is_sum(number, digest.hexdigest())


def _cut(
    memories: Sequence[memoryview], num_bytes: int
) -> tuple[list[memoryview], list[memoryview]]:
    """The first ``num_bytes`` of ``memories``, or all that there are, and the rest."""
    for index, memory in enumerate(memories):
        if num_bytes < len(memory):
            first = [memory[:num_bytes]] if num_bytes else []
            return [*memories[:index], *first], [memory[num_bytes:], *memories[index + 1 :]]
        num_bytes -= len(memory)
    return list(memories), []


@contextmanager
def reading(path: Location, record: FileRecord) -> Iterator[BlockReader]:
    """A reader of a file's blocks. Raises ``OSError``."""
    with medium_of(path).open(path) as source:
        yield BlockReader(source, record)


@contextmanager
def refusals(path: Location) -> Iterator[None]:
    """Turn what the system refuses about ``path`` into a WorkError that names path and cause."""
    try:
        yield
    except OSError as error:
        raise WorkError(f"{path} could not be written: {told(error)}.") from error


def unreadable(path: Location, error: OSError) -> str:
    """What is wrong with a file that cannot be read, where the file is at fault.

    Raises Unavailable where the way to it is: a right that was lost, a store that does not answer.
    Whoever took that for damage would go on from an older step, or from none.
    """
    problem = f"cannot be read: {told(error)}"
    is_gone = isinstance(error, FileNotFoundError)
    if is_gone or (isinstance(path, Path) and error.errno in _DAMAGES):
        return problem
    raise Unavailable(f"{path} {problem}.") from error


def told(error: OSError) -> str:
    """What the system says, or the store."""
    return (error.strerror or str(error)).removesuffix(".")


def _sums(view: memoryview) -> list[str]:
    return [_sum(view[start : start + BLOCK_BYTES]) for start in range(0, len(view), BLOCK_BYTES)]


def _sum(data: Buffer) -> str:
    return xxhash.xxh3_64_hexdigest(data)
