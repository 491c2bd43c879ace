"""Memory in which a rank's file takes shape while the run goes on.

It is anonymous and shared with the process that writes: no name in any file system, so that the
system frees it when both have ended, however they end. Where values come from a GPU it is pinned.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence

import torch

from shoal.checkpoint.shard import Blob, Layout
from shoal.errors import WorkError
from shoal.storage import WriterProcess


class StagingBuffer:
    """Room for one file; grows to what is laid out in it."""

    def __init__(self) -> None:
        self.descriptor = _anonymous_file()
        """The memory, for another process to map."""
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._key: tuple[object, ...] | None = None
        self._targets: list[torch.Tensor] = []
        self._pinned = False
        self._readers: list[WriterProcess] = []

    def note_reader(self, process: WriterProcess) -> None:
        """Fill it no more until ``process`` has ended, which is killed and may yet read it."""
        self._readers.append(process)

    @property
    def is_read(self) -> bool:
        """Whether such a process has not ended, because its disk hangs."""
        self._readers = [process for process in self._readers if not process.is_gone]
        return bool(self._readers)

    def lay(self, layout: Layout, values: Sequence[torch.Tensor], blobs: Sequence[Blob]) -> None:
        """Prepare for values of these shapes and types, and take the blobs. Cheap where it was so.

        Raises WorkError where the system has no memory to give, and where somebody reads it.
        """
        if self.is_read:
            raise WorkError(
                "The memory to stage a checkpoint is that of an earlier save, "
                "whose writing process does not end: its disk hangs."
            )
        if layout.key != self._key:
            self._key = None
            self._grow(layout.shard.num_bytes)
            for start, data in layout.frames:
                self._put(start, data)
            self._targets = [
                self._memory[slot.start : slot.start + value.nbytes]
                .view(value.dtype)
                .view(value.shape)
                for slot, value in zip(layout.slots, values, strict=True)
            ]
            self._key = layout.key
        if not self._pinned and any(value.is_cuda for value in values):
            self._pin()
        end = layout.shard.num_bytes
        for blob in reversed(blobs):
            end -= len(blob.data)
            self._put(end, blob.data)

    def fill(self, values: Sequence[torch.Tensor], ready: torch.cuda.Event | None) -> None:
        """Copy the values, and return once they are here; from any thread.

        ``ready`` is after the last change of values that are on a GPU. Raises WorkError where not
        all could be copied.
        """
        try:
            self._copy(values, ready)
        except RuntimeError as error:
            raise WorkError(f"The state could not be copied aside: {error}") from error

    def _copy(self, values: Sequence[torch.Tensor], ready: torch.cuda.Event | None) -> None:
        if ready is None:
            torch._foreach_copy_(self._targets, list(values))
            return
        device = next(value.device for value in values if value.is_cuda)
        stream = torch.cuda.Stream(device)
        stream.wait_event(ready)
        with torch.cuda.stream(stream):
            torch._foreach_copy_(self._targets, list(values), non_blocking=True)
        stream.synchronize()

    def close(self) -> None:
        """Let go of the memory."""
        self._unpin()
        self._targets.clear()
        self._memory = torch.empty(0, dtype=torch.uint8)
        os.close(self.descriptor)

    def _grow(self, num_bytes: int) -> None:
        if num_bytes <= self._memory.numel():
            return
        self._unpin()
        try:
            os.ftruncate(self.descriptor, num_bytes)
            mapping = mmap.mmap(self.descriptor, num_bytes)
        except OSError as error:
            raise WorkError(
                f"{num_bytes:,} bytes of memory to stage a checkpoint could not be had: "
                f"{error.strerror}. Set checkpoint.asynchronous=false to save without."
            ) from error
        self._memory = torch.frombuffer(mapping, dtype=torch.uint8)

    def _put(self, start: int, data: bytes) -> None:
        if data:
            source = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            self._memory[start : start + len(data)].copy_(source)

    def _pin(self) -> None:
        """Have the driver copy from a GPU straight to here."""
        code = torch.cuda.cudart().cudaHostRegister(
            self._memory.data_ptr(), self._memory.numel(), 0
        )
        if int(code):
            raise WorkError(f"Memory to stage a checkpoint could not be pinned: CUDA error {code}.")
        self._pinned = True

    def _unpin(self) -> None:
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())
            self._pinned = False


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("shoal-checkpoint")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
