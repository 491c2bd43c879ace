"""Chains of collectives that run beside the compute, on CUDA on a side stream.

A chain is an iterator that issues a collective each time it is resumed and yields what is pending::

    CPU    start: issue the first ─ compute ─ advance: wait, issue the next ─ compute ─ finish: wait
    CUDA   start: issue all of them on the side stream ─ compute ─ finish: compute stream waits

What a chain allocates is allocated and freed on the side stream, what it reads is kept until
compute has waited for it; so the caching allocator needs no ``record_stream``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from shoal.fsdp.communicator import Pending


class Task(Protocol):
    """A chain under way."""

    def advance(self) -> bool:
        """Have the collective under way over, and the next one issued; whether there is one."""

    def finish(self) -> None:
        """Return when the results of the whole chain may be used by compute."""


class Lane(Protocol):
    """Where chains run, one after another."""

    def start(self, chain: Iterator[Pending], keep: object = None) -> Task:
        """Run a chain after all compute issued so far; ``keep`` is what it reads from."""

    def run(self, deed: Callable[[], None]) -> None:
        """Do something, such as freeing memory, after all compute issued so far."""


class _HostTask:
    def __init__(self, chain: Iterator[Pending]) -> None:
        self._chain = chain
        self._pending = next(chain, None)

    def advance(self) -> bool:
        """See ``Task``."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = next(self._chain, None)
        return self._pending is not None

    def finish(self) -> None:
        """See ``Task``."""
        while self.advance():
            pass


class HostLane:
    """For CPU tensors: the chain itself holds on to what it still reads."""

    def start(self, chain: Iterator[Pending], keep: object = None) -> Task:
        """See ``Lane``."""
        return _HostTask(chain)

    def run(self, deed: Callable[[], None]) -> None:
        """See ``Lane``."""
        deed()


class _StreamTask:
    def __init__(self, done: torch.cuda.Event, keep: object) -> None:
        self._done = done
        self._keep = keep

    def advance(self) -> bool:
        """See ``Task``; the whole chain is issued already, and what it read becomes free."""
        self.finish()
        return False

    def finish(self) -> None:
        """See ``Task``."""
        self._done.wait()
        self._keep = None


class StreamLane:
    """A CUDA stream beside the compute stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def start(self, chain: Iterator[Pending], keep: object = None) -> Task:
        """See ``Lane``."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for pending in chain:
                pending.wait()
            done = torch.cuda.Event()
            done.record()
        return _StreamTask(done, keep)

    def run(self, deed: Callable[[], None]) -> None:
        """See ``Lane``."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            deed()


def lane_for(device: torch.device) -> Lane:
    """A lane of its own for chains on ``device``."""
    return StreamLane(device) if device.type == "cuda" else HostLane()
