"""An anonymous file in memory that several processes of one host map.

It has no name in any file system: the kernel frees it when the last process that holds it ends,
however it ends, and the size of ``/dev/shm`` does not limit it. Pages exist once touched.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from dataclasses import dataclass
from typing import ClassVar

import torch

from shoal.errors import WorkError

ALIGNMENT = 1 << 21
"""Mappings of this alignment move by exchanging page tables instead of entries."""

_FILE_BYTES = 1 << 44  # sparse; a bound on what one axis may ever address
_MAP_FIXED = 0x10
_MREMAP_MAYMOVE_FIXED_DONTUNMAP = 1 | 2 | 4
_PUNCH_HOLE_KEEP_SIZE = 2 | 1
_FUTEX = 202  # the number of the system call on x86-64, where alone this file is used
_FUTEX_WAIT = 0
_FUTEX_WAKE = 1
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_void_p,
]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFileAddress:
    """Where another process of the same user and process namespace finds the file."""

    pid: int
    descriptor: int
    name: str

    @property
    def path(self) -> str:
        """The file as an entry of the owner's descriptor table."""
        return f"/proc/{self.pid}/fd/{self.descriptor}"


class MemoryFile:
    """One such file, held open by this process."""

    def __init__(self, descriptor: int, name: str) -> None:
        self._descriptor = descriptor
        self._name = name
        self.close = weakref.finalize(self, os.close, descriptor)
        """Lets go of the file; its mappings stay."""

    @classmethod
    def create(cls, name: str) -> MemoryFile:
        """A new file; raises ``OSError`` where the system has none to give."""
        descriptor = os.memfd_create(name)
        os.ftruncate(descriptor, _FILE_BYTES)
        return cls(descriptor, name)

    @classmethod
    def open(cls, address: MemoryFileAddress) -> MemoryFile:
        """The file of another process; raises ``OSError`` if it is not to be seen from here."""
        found = os.readlink(address.path)
        if not found.startswith(f"/memfd:{address.name}"):
            # Another host or namespace: a stranger's descriptor, which must not even be opened.
            raise FileNotFoundError(f"{address.path} is {found}, not {address.name}")
        return cls(os.open(address.path, os.O_RDWR), address.name)

    @property
    def address(self) -> MemoryFileAddress:
        """For other processes to open, while this one holds the file."""
        return MemoryFileAddress(pid=os.getpid(), descriptor=self._descriptor, name=self._name)

    @property
    def resident_bytes(self) -> int:
        """Memory that the file's pages take, counted once for all processes."""
        return os.fstat(self._descriptor).st_blocks * 512

    def map(self, offset: int, nbytes: int) -> int:
        """Map a range anywhere; the address."""
        return _mapped(0, nbytes, mmap.MAP_SHARED, self._descriptor, offset)

    def map_at(self, address: int, offset: int, nbytes: int) -> None:
        """Map a range in place of whatever is mapped at ``address``."""
        _mapped(address, nbytes, mmap.MAP_SHARED | _MAP_FIXED, self._descriptor, offset)

    def punch(self, offset: int, nbytes: int) -> None:
        """Give a range's pages back to the system; it reads as zeros in every process."""
        if _libc.fallocate(
            self._descriptor,
            _PUNCH_HOLE_KEEP_SIZE,
            ctypes.c_int64(offset),
            ctypes.c_int64(nbytes),
        ):
            raise OSError(ctypes.get_errno(), "fallocate")


def reserve(nbytes: int) -> int:
    """An ``ALIGNMENT``-aligned range of addresses without memory behind it."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    start = _mapped(0, nbytes + ALIGNMENT, flags, -1, 0, protection=0)
    address = -(-start // ALIGNMENT) * ALIGNMENT
    if address > start:
        unmap(start, address - start)
    unmap(address + nbytes, start + ALIGNMENT - address)
    return address


def move_pages(source: int, target: int, nbytes: int) -> bool:
    """Move the page tables of a mapping to another reserved range; whether the kernel could."""
    moved = _libc.mremap(source, nbytes, nbytes, _MREMAP_MAYMOVE_FIXED_DONTUNMAP, target)
    return bool(moved == target)


def unmap(address: int, nbytes: int) -> None:
    """End a mapping or reservation."""
    if nbytes and _libc.munmap(address, nbytes):
        raise OSError(ctypes.get_errno(), "munmap")


def tensor_at(address: int, numel: int, dtype: torch.dtype, *, keep: object = None) -> torch.Tensor:
    """Mapped memory as a flat tensor with a storage and a version counter of its own.

    ``keep`` lives at least as long as the storage.
    """
    if numel == 0:
        return torch.empty(0, dtype=dtype)
    memory = bytes_at(address, numel * dtype.itemsize)
    memory.keep = keep  # type: ignore[attr-defined]  # the storage keeps what it was made from
    return torch.frombuffer(memory, dtype=dtype)


def bytes_at(address: int, nbytes: int) -> ctypes.Array[ctypes.c_char]:
    """Mapped memory as an object that ``torch.frombuffer`` takes and keeps alive."""
    return (ctypes.c_char * nbytes).from_address(address)


def words_at(address: int, num_words: int) -> ctypes.Array[ctypes.c_int64]:
    """Mapped memory as signed 64-bit words, each read and written as a whole."""
    return (ctypes.c_int64 * num_words).from_address(address)


def sleep_while(address: int, value: int, timeout_s: float) -> None:
    """Sleep until ``wake`` or the timeout, if the low half of the word is still ``value``'s."""
    timeout = _TimeSpec(int(timeout_s), int(timeout_s % 1 * 1e9))
    low = ctypes.c_uint32(value)
    _libc.syscall(_FUTEX, ctypes.c_void_p(address), _FUTEX_WAIT, low, ctypes.byref(timeout))


def wake(address: int) -> None:
    """Wake the process that sleeps on a word."""
    _libc.syscall(_FUTEX, ctypes.c_void_p(address), _FUTEX_WAKE, 1)


class _TimeSpec(ctypes.Structure):
    _fields_: ClassVar = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


def _mapped(
    address: int,
    nbytes: int,
    flags: int,
    descriptor: int,
    offset: int,
    protection: int = mmap.PROT_READ | mmap.PROT_WRITE,
) -> int:
    mapped = _libc.mmap(address, nbytes, protection, flags, descriptor, offset)
    if mapped in (None, _FAILED):
        problem = os.strerror(ctypes.get_errno())
        raise WorkError(
            f"{nbytes} bytes of memory shared between ranks could not be had: {problem}"
        )
    return int(mapped)
