"""Kernels: compiled once, kept on disk, and run on a few threads.

A kernel's work is cut into tasks that do not touch each other's results, and each thread takes the
next task until none is left (see ``threads``). Which thread computes a task says nothing about the
bits of its result.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from contextvars import ContextVar
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from numba import carray  # type: ignore[attr-defined]
from numba.core import types

from shoal.ops.fixed.compiling import compiled
from shoal.ops.fixed.lanes import device
from shoal.ops.fixed.threads import helpers, num_threads

Body = Callable[[Any, Any, Any], None]


class Launch(NamedTuple):
    """One run of a kernel, which can be run again: an entry of a table that ``Helpers`` runs."""

    entry: Any
    """Address of the code, address of the arguments, number of tasks, number of threads: int64."""
    arguments: Any
    """An array of int64."""
    kernel: str
    """Its name."""


LAUNCHES: ContextVar[list[Launch] | None] = ContextVar("launches", default=None)
"""Where the launches of this thread are written down, if they are: see ``program``."""


class Kernel:
    """A compiled function of (task, thread, arguments), run for each task once."""

    def __init__(self, body: Body, capacity: int, name: str) -> None:
        self.name = name
        self._capacity = capacity
        self._entry = _entry(body, capacity)
        self._arguments = ctypes.c_int64 * capacity

    def __call__(self, tasks: int, *arguments: int) -> None:
        """Run tasks ``0`` to ``tasks - 1``; returns when all are done.

        The body sees ``arguments`` as an array of int64; floats are given as their ``bits``.
        """
        if tasks <= 0:
            return
        assert len(arguments) == self._capacity, f"{self.name} takes {self._capacity} arguments"
        memory = self._arguments(*arguments)
        threads = min(num_threads(), tasks)
        entry = _LaunchEntry(self.address, ctypes.addressof(memory), tasks, threads)
        helpers().run(ctypes.addressof(entry), 1, threads)
        launches = LAUNCHES.get()
        if launches is not None:
            launches.append(Launch(entry, memory, self.name))

    @cached_property
    def address(self) -> int:
        """Where the compiled code is; compiles it, or loads it from disk, when asked first."""
        parameters = (types.int64, types.int64, types.CPointer(types.int64))
        return compiled(self._entry, self.name, *parameters)


_LaunchEntry = ctypes.c_int64 * 4


def kernel(capacity: int, name: str) -> Callable[[Body], Kernel]:
    """Make a ``Kernel`` of a function of (task, thread, arguments).

    ``capacity`` is the number of arguments, ``name`` is the kernel's own within this package.
    """
    return lambda body: Kernel(body, capacity, name)


@lru_cache(maxsize=256)
def bits(value: float) -> int:
    """``value`` as fp32 for a kernel's argument, which finds it by ``float_of``."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def _entry(body: Body, capacity: int) -> Callable[[Any, Any, Any], None]:
    run = device(body)

    def entry(task: Any, thread: Any, memory: Any) -> None:
        run(task, thread, carray(memory, (capacity,)))

    return entry
