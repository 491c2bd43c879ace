"""Gather buffers in memory that the ranks of one host share, and the slots of memory behind them.

A buffer is a range of addresses that never changes; a slot is a range of the shared file, with
pages. A gather moves a free slot of its buffer's size class under it, so that a model of many
units lives on the two or three slots that are in use at once, already warm:

    buffer of unit 0   ──┐ released
    buffer of unit 1   ──┼──► slot 1
    buffer of unit 2   ──┴──► slot 0, which was under unit 0

All ranks make the same calls in the same order, so they choose the same slots without talking.
What differs is when each of them stops reading: a slot carries the count of releases that every
rank must have reached before anyone may write to it.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict, deque
from dataclasses import dataclass

import torch

from shoal.fsdp.board import Board, Counter
from shoal.fsdp.memory_file import (
    ALIGNMENT,
    MemoryFile,
    bytes_at,
    move_pages,
    reserve,
    unmap,
)


@dataclass(slots=True, eq=False)
class _Slot:
    offset: int
    capacity: int
    free_after: int = 0
    """Releases that every rank must have reached before the slot may be written."""
    mapped_at: int | None = None
    """Where this process has the slot's pages in its page tables."""
    last_buffer: GatherBuffer | None = None


@dataclass(slots=True, eq=False)
class GatherBuffer:
    """One buffer that a gather fills; ``address`` and ``capacity`` never change."""

    address: int
    nbytes: int
    capacity: int
    born: int
    """Releases that a rank has counted once it has this buffer too."""
    slot: _Slot | None = None
    released: bool = False
    gathered: bool = False
    """Whether it holds contents that ranks may be reading."""


class GatherBuffers:
    """The gather buffers of one axis, as one rank has them."""

    def __init__(self, file: MemoryFile, region: int, board: Board) -> None:
        """``region`` is where in the file the slots begin."""
        self._file = file
        self._region = self._region_end = region
        self._board = board
        self._buffers: dict[int, GatherBuffer] = {}
        self._free: defaultdict[int, deque[_Slot]] = defaultdict(deque)
        self._num_releases = 0
        self._dead: deque[GatherBuffer] = deque()
        self._lock = threading.Lock()

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A buffer that gets memory when it is first gathered into.

        The memory goes back once the last view of it dies.
        """
        nbytes = numel * dtype.itemsize
        if nbytes == 0:
            return torch.empty(0, dtype=dtype)
        capacity = max(ALIGNMENT, 1 << (nbytes - 1).bit_length())
        with self._lock:
            buffer = GatherBuffer(
                address=reserve(capacity),
                nbytes=nbytes,
                capacity=capacity,
                born=self._num_releases + 1,
            )
            self._buffers[buffer.address] = buffer
            # In this order: who sees the release knows that this rank's buffers live (see _bury).
            self._board.set(Counter.LIVE, len(self._buffers))
            self._count_release()
        self._bury()
        memory = bytes_at(buffer.address, nbytes)
        weakref.finalize(memory, self._die, buffer).atexit = False
        return torch.frombuffer(memory, dtype=dtype)

    def find(self, tensor: torch.Tensor) -> GatherBuffer | None:
        """The buffer that ``tensor`` is the whole of."""
        buffer = self._buffers.get(tensor.data_ptr())
        if buffer is None or buffer.nbytes != tensor.numel() * tensor.element_size():
            return None
        return buffer

    def release(self, tensor: torch.Tensor) -> None:
        """Free the slot under a buffer."""
        buffer = self.find(tensor)
        if buffer is None or buffer.released:
            return
        buffer.released = True
        if buffer.slot is not None:
            with self._lock:
                self._stop_reading(buffer, buffer.slot)
                self._free[buffer.capacity].append(buffer.slot)
                buffer.slot = None
            self._bury()

    def restore(self, tensor: torch.Tensor) -> None:
        """Let a released buffer have memory again."""
        buffer = self.find(tensor)
        if buffer is not None:
            buffer.released = False

    def prepare(self, buffer: GatherBuffer) -> int:
        """Have memory under a buffer that a gather is about to fill.

        Returns the releases that every rank must have reached before anyone may write to it.
        """
        assert not buffer.released, "a gather into a released buffer"
        with self._lock:
            slot = buffer.slot or self._place(buffer)
            if buffer.gathered:
                self._stop_reading(buffer, slot)
            buffer.gathered = True
        self._bury()
        return slot.free_after

    def _stop_reading(self, buffer: GatherBuffer, slot: _Slot) -> None:
        slot.free_after = self._count_release()
        buffer.gathered = False

    def _count_release(self) -> int:
        self._num_releases += 1
        self._board.set(Counter.RELEASED, self._num_releases)
        return self._num_releases

    def _place(self, buffer: GatherBuffer) -> _Slot:
        free = self._free[buffer.capacity]
        own = next((slot for slot in free if slot.last_buffer is buffer), None)
        if own is not None:
            free.remove(own)
            slot = own
        elif free:
            slot = free.popleft()
        else:
            slot = _Slot(self._region_end, buffer.capacity)
            self._region_end += buffer.capacity
        if slot.mapped_at != buffer.address:
            self._map(slot, buffer)
        slot.last_buffer = buffer
        slot.free_after = max(slot.free_after, buffer.born)
        buffer.slot = slot
        return slot

    def _map(self, slot: _Slot, buffer: GatherBuffer) -> None:
        for other in self._free[buffer.capacity]:
            if other.mapped_at == buffer.address:
                other.mapped_at = None
        if slot.mapped_at is None or not move_pages(slot.mapped_at, buffer.address, slot.capacity):
            # New memory, or a kernel that cannot move the pages of a shared mapping (before 5.13).
            self._file.map_at(buffer.address, slot.offset, slot.capacity)
        slot.mapped_at = buffer.address

    def _die(self, buffer: GatherBuffer) -> None:
        self._dead.append(buffer)
        self._bury()

    def _bury(self) -> None:
        """Give back the addresses of dead buffers, and all pages once no rank has buffers left.

        Runs wherever a last reference dies, so also in the middle of another call, which then does
        it at its end. A dead buffer's slot is not used again: ranks collect their garbage at
        different times and must choose the same slots. No peer can be writing to the pages that go:
        its buffer would wait for the release at the end of this rank's ``allocate``.
        """
        while self._dead and self._lock.acquire(blocking=False):
            try:
                buffer = self._dead.popleft()
                del self._buffers[buffer.address]
                for slot in [*self._free[buffer.capacity], buffer.slot]:
                    if slot is not None and slot.mapped_at == buffer.address:
                        slot.mapped_at = None
                unmap(buffer.address, buffer.capacity)
                self._board.set(Counter.LIVE, len(self._buffers))
            finally:
                self._lock.release()  # also orders the write above before the reads below
            size = self._region_end - self._region  # 0 where no buffer was ever in use
            if size and not self._buffers and self._board.highest(Counter.LIVE) == 0:
                self._file.punch(self._region, size)
