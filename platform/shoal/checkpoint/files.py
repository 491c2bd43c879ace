"""Files that are counted and hashed as they are written, and flushed to the disk."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from shoal.errors import WorkError

READ_BYTES = 4 * 2**20
LARGE_BYTES = 2**20
"""From here on a write is worth another thread that hashes meanwhile."""


class Buffer(Protocol):
    """Whatever gives its bytes to ``memoryview``."""

    def __buffer__(self, flags: int, /) -> memoryview: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """What a file must be to be whole."""

    num_bytes: int
    """Its size."""

    sha256: str
    """Hexadecimal SHA-256 of its bytes."""


class HashingFile:
    """A new file under way; short writes are taken to their end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._digest = hashlib.sha256()
        self._num_bytes = 0
        self.failure: OSError | None = None
        """The first refusal of the system, for callers between whom and us it gets lost."""
        self._hasher = ThreadPoolExecutor(max_workers=1)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)

    def write(self, data: Buffer) -> int:
        """Append all of ``data``; the number of its bytes."""
        view = memoryview(data).cast("B")
        if len(view) < LARGE_BYTES:
            self._digest.update(view)
            self._send(view)
            return len(view)
        hashed = self._hasher.submit(self._digest.update, view)
        try:
            self._send(view)
        finally:
            hashed.result()  # ``data`` is the caller's again
        return len(view)

    def _send(self, view: memoryview) -> None:
        sent = 0
        try:
            while sent < len(view):
                sent += os.write(self._descriptor, view[sent:])
        except OSError as error:
            self.failure = self.failure or error
            raise
        self._num_bytes += sent

    def tell(self) -> int:
        """Bytes so far."""
        return self._num_bytes

    def flush(self) -> None:
        """Part of a stream's face; nothing is held back."""

    def finish(self) -> FileRecord:
        """Flush to the disk and check that the disk holds as many bytes as were written."""
        os.fsync(self._descriptor)
        held = os.fstat(self._descriptor).st_size
        if held != self._num_bytes:
            raise WorkError(
                f"{self._path}: {self._num_bytes} bytes were written and the disk holds {held}."
            )
        return FileRecord(num_bytes=self._num_bytes, sha256=self._digest.hexdigest())

    def close(self) -> None:
        """Give thread and descriptor back."""
        self._hasher.shutdown()
        os.close(self._descriptor)


@contextmanager
def creating(path: Path) -> Iterator[HashingFile]:
    """A new file at ``path``; raises WorkError that names path and cause where the system refuses.

    Call ``finish`` inside the block.
    """
    try:
        file = HashingFile(path)
    except OSError as error:
        raise _refused(path, error) from error
    try:
        yield file
    except (OSError, RuntimeError) as error:  # torch.save answers a refused write with its own
        cause = file.failure or error
        if isinstance(cause, OSError):
            raise _refused(path, cause) from error
        raise
    finally:
        file.close()


def write_file(path: Path, data: bytes) -> FileRecord:
    """Write a whole new file."""
    with creating(path) as file:
        file.write(data)
        return file.finish()


def record_of(path: Path) -> FileRecord:
    """Size and hash of a file as it is on the disk."""
    digest = hashlib.sha256()
    num_bytes = 0
    with path.open("rb", buffering=0) as file:
        while part := file.read(READ_BYTES):
            digest.update(part)
            num_bytes += len(part)
    return FileRecord(num_bytes=num_bytes, sha256=digest.hexdigest())


def flush_folder(folder: Path) -> None:
    """Make the names in a folder last."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _refused(path: Path, error: OSError) -> WorkError:
    return WorkError(f"{path} could not be written: {error.strerror or error}.")
