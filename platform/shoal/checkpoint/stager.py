"""Copies a rank's state aside, in a thread, for a process to write from there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from shoal.checkpoint.shard import Layout, values_of
from shoal.checkpoint.snapshot import Snapshot
from shoal.checkpoint.staging import StagingBuffer

NUM_BUFFERS = 2
"""Saves that may be under way; each takes memory for all that the rank writes."""


class Stager:
    """Memory for some saves, and one thread that fills it and hands it on."""

    def __init__(self) -> None:
        self.buffers: Sequence[StagingBuffer] = [StagingBuffer() for _ in range(NUM_BUFFERS)]
        """All of them."""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="stage-checkpoint")
        self._copy: Future[None] | None = None
        self._hook: Any = None

    @property
    def is_busy(self) -> bool:
        """Whether somebody has yet to wait for a copy."""
        return self._copy is not None

    def free(self, used: Collection[StagingBuffer]) -> StagingBuffer:
        """A buffer beside those in use, of which there is one; if there is a choice, a fit one."""
        unused = (buffer for buffer in self.buffers if buffer not in used)
        return min(unused, key=lambda buffer: buffer.is_read)

    def stage(
        self,
        buffer: StagingBuffer,
        layout: Layout,
        snapshot: Snapshot,
        then: Callable[[], None],
    ) -> None:
        """Begin to copy, and do something ``then``, once all of it is here, and only then.

        Raises WorkError where the system has no memory to give.
        """
        values = values_of(layout, snapshot.entries)
        buffer.lay(layout, values, snapshot.blobs)
        ready = None
        if any(value.is_cuda for value in values):
            ready = torch.cuda.current_stream().record_event()
        self._copy = copy = self._thread.submit(buffer.fill, values, ready)

        def go_on() -> None:
            if copy.exception() is None:
                then()

        self.do(go_on)

    def do(self, deed: Callable[[], None]) -> None:
        """Do what may have to wait for a disk, after all that was begun before."""
        self._thread.submit(deed)

    def wait(self) -> None:
        """Wait until the copy is made. Raises WorkError, once, where it could not be."""
        copy, self._copy = self._copy, None
        if copy is not None:
            copy.result()

    def watch(self, optimizer: torch.optim.Optimizer | None, wait: Callable[[], None]) -> None:
        """Have the optimizer's next step ``wait`` for the copy; without one, wait now."""
        self._forget()
        if optimizer is None:
            wait()
        else:
            self._hook = optimizer.register_step_pre_hook(lambda *_: wait())

    def close(self) -> None:
        """Give thread and memory back; nobody reads it any more."""
        self._forget()
        self._thread.shutdown()
        for buffer in self.buffers:
            buffer.close()

    def _forget(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
