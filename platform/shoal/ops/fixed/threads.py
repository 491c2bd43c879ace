"""The threads that kernels run on: the caller's, and helpers that come when they can.

A launch is a compiled function of (task, thread, arguments), to be called once for each task. The
caller publishes it, takes one task after the other itself, and returns when each task that someone
took is done. A helper that sleeps is woken, but never waited for: where the operating system does
not let it run, the caller has done its share before.

    caller    publish ── task 0 ── task 2 ── task 3 ── all taken ── task 1 still runs? ── return
    helper         (woken) ─────── task 1 ─────────────────────────────────┘ done

All of this is compiled code on a few words of shared memory, without the interpreter's lock:

    ticket    number of the launch * 2**32 + next task; a task is taken by adding 1 to it
    done      finished tasks of the launch
    launch    function, arguments, number of tasks, number of threads
    sleepers  helpers that wait for the semaphore, or are about to

A helper takes a task by compare-and-swap, so a stale look at the launch cannot take one of another:
between launches the ticket is closed, and only then are the launch's words written. Once it has a
task, the caller waits for it, so they stay as they are until it is done.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from llvmlite import ir
from numba.core import cgutils, types

from shoal.ops.fixed.compiling import compiled
from shoal.ops.fixed.lanes import I64, address, device, operation, pointer
from shoal.ops.fixed.memory import read_int, write_int

_TICKET, _DONE, _SLEEPERS, _SEMAPHORE = 0, 64, 128, 192
_FUNCTION, _ARGUMENTS, _TASKS, _THREADS, _STOP = 256, 264, 272, 280, 320
_BYTES = 384
_CLOSED = 2**31 - 1
"""The next task of a ticket that is closed."""
_SPINS = 1500
"""Looks at the ticket, some 50 microseconds, before a helper sleeps or the caller gives way."""
_LAUNCH_BYTES = 32
"""Of an entry of a table of launches: function, arguments, tasks, threads, each an int64."""


class Helpers:
    """Threads that help with the launches of one caller at a time."""

    def __init__(self) -> None:
        self._shared = (ctypes.c_char * (_BYTES + 64))()
        self._start = ctypes.addressof(self._shared)
        self._start += -self._start % 64
        ctypes.c_int64.from_address(self._start + _TICKET).value = _CLOSED
        ctypes.CDLL(None).sem_init(ctypes.c_void_p(self._start + _SEMAPHORE), 0, 0)
        self._caller = threading.Lock()
        self._threads: list[threading.Thread] = []

    def run(self, table: int, count: int, threads: int) -> None:
        """Run ``count`` launches, whose entries begin at ``table``, in order; at most ``threads``.

        A second caller at a time gets no help.
        """
        if threads == 1 or not self._caller.acquire(blocking=False):
            _code().run(self._start, table, count, 1)
            return
        try:
            while len(self._threads) < threads - 1:
                self._add()
            _code().run(self._start, table, count, threads)
        finally:
            self._caller.release()

    def _add(self) -> None:
        number = len(self._threads) + 1
        thread = threading.Thread(
            target=_code().serve,
            args=(self._start, number),
            name=f"shoal-kernels-{number}",
            daemon=True,
        )
        thread.start()
        self._threads.append(thread)

    def stop(self) -> None:
        """End the helpers, which are idle; waits for them."""
        ctypes.c_int64.from_address(self._start + _STOP).value = 1
        for _ in self._threads:
            ctypes.CDLL(None).sem_post(ctypes.c_void_p(self._start + _SEMAPHORE))
        for thread in self._threads:
            thread.join(timeout=1)
        self._threads.clear()


@cache
def helpers() -> Helpers:
    """Those of this process."""
    made = Helpers()
    # Before the compiled code goes; a child process starts without the threads of its parent.
    atexit.register(made.stop)
    os.register_at_fork(after_in_child=helpers.cache_clear)
    return made


class _Code:
    """The compiled functions below; calling them lets go of the interpreter's lock."""

    def __init__(self) -> None:
        self.run = _function(_run, "threads_run", 4)
        self.serve = _function(_serve, "threads_serve", 2)


@cache
def _code() -> _Code:
    return _Code()


def _function(function: Callable[..., None], name: str, parameters: int) -> Any:
    code = compiled(function, name, *[types.int64] * parameters)
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * parameters)(code)


def num_threads() -> int:
    """Threads that a launch may have: as many as torch may."""
    return torch.get_num_threads()


# --- compiled code ----------------------------------------------------------------------------

_semaphore_wait = types.ExternalFunction("sem_wait", types.int32(types.int64))
_semaphore_post = types.ExternalFunction("sem_post", types.int32(types.int64))
_give_way = types.ExternalFunction("sched_yield", types.int32())


@operation(types.int64, address)
def _look(b: ir.IRBuilder, where: ir.Value) -> ir.Value:
    """An int64 that other threads write."""
    return b.load_atomic(pointer(b, where, I64), "seq_cst", 8)


@operation(types.void, address, types.int64)
def _set(b: ir.IRBuilder, where: ir.Value, value: ir.Value) -> None:
    """Write an int64 that other threads read."""
    b.store_atomic(value, pointer(b, where, I64), "seq_cst", 8)


@operation(types.int64, address, types.int64)
def _add(b: ir.IRBuilder, where: ir.Value, value: ir.Value) -> ir.Value:
    """Add to an int64, and give what it was before."""
    return b.atomic_rmw("add", pointer(b, where, I64), value, "seq_cst")


@operation(types.int64, address, types.int64, types.int64)
def _swap(b: ir.IRBuilder, where: ir.Value, old: ir.Value, new: ir.Value) -> ir.Value:
    """Write ``new`` if the int64 there is ``old``; 1 if it was, else 0."""
    result = b.cmpxchg(pointer(b, where, I64), old, new, "seq_cst", "seq_cst")
    return b.zext(b.extract_value(result, 1), I64)


@operation(types.void)
def _pause(b: ir.IRBuilder) -> None:
    """Tell the CPU that this is a loop that waits."""
    if b.module.triple.startswith("x86_64"):
        signature = ir.FunctionType(ir.VoidType(), [])
        b.call(cgutils.get_or_insert_function(b.module, signature, "llvm.x86.sse2.pause"), [])


@operation(types.void, address, types.int64, types.int64, address)
def _call(
    b: ir.IRBuilder, function: ir.Value, task: ir.Value, thread: ir.Value, arguments: ir.Value
) -> None:
    kind = ir.FunctionType(ir.VoidType(), [I64, I64, I64]).as_pointer()
    b.call(b.inttoptr(function, kind), [task, thread, arguments])


@device
def _wake(shared: Any, most: Any) -> None:
    """Wake up to ``most`` helpers that sleep."""
    for _ in range(min(_look(shared + _SLEEPERS), most)):
        _add(shared + _SLEEPERS, -1)
        _semaphore_post(shared + _SEMAPHORE)


@device
def _share(shared: Any, function: Any, arguments: Any, tasks: Any, threads: Any) -> None:
    """Run one launch with help."""
    write_int(shared + _FUNCTION, function)
    write_int(shared + _ARGUMENTS, arguments)
    write_int(shared + _TASKS, tasks)
    write_int(shared + _THREADS, threads)
    _set(shared + _DONE, 0)
    number = (_look(shared + _TICKET) >> 32) + 1
    _set(shared + _TICKET, number << 32)
    _wake(shared, min(threads, tasks) - 1)
    finished = 0
    task = _add(shared + _TICKET, 1) & 0xFFFFFFFF
    while task < tasks:
        _call(function, task, 0, arguments)
        finished += 1
        task = _add(shared + _TICKET, 1) & 0xFFFFFFFF
    _add(shared + _DONE, finished)
    looks = 0
    while _look(shared + _DONE) < tasks:
        looks += 1
        if looks < _SPINS:
            _pause()
        else:
            _give_way()
    _set(shared + _TICKET, (number << 32) + _CLOSED)


def _run(shared: Any, table: Any, count: Any, threads: Any) -> None:
    """Run the launches of a table."""
    for place in range(table, table + count * _LAUNCH_BYTES, _LAUNCH_BYTES):
        function, arguments = read_int(place), read_int(place + 8)
        tasks, here = read_int(place + 16), min(threads, read_int(place + 24))
        if here > 1 and tasks > 1:
            _share(shared, function, arguments, tasks, here)
        else:
            for task in range(tasks):
                _call(function, task, 0, arguments)


@device
def _open(shared: Any, ticket: Any, thread: Any) -> Any:
    """Whether the launch of a ticket has a task for this helper."""
    if thread >= read_int(shared + _THREADS):
        return False
    return (ticket & 0xFFFFFFFF) < read_int(shared + _TASKS)


@device
def _help(shared: Any, ticket: Any, thread: Any) -> None:
    """Take a task of the ticket, unless someone was faster, and do it."""
    if _swap(shared + _TICKET, ticket, ticket + 1):
        function, arguments = read_int(shared + _FUNCTION), read_int(shared + _ARGUMENTS)
        _call(function, ticket & 0xFFFFFFFF, thread, arguments)
        _add(shared + _DONE, 1)


@device
def _sleep(shared: Any, thread: Any) -> None:
    """Wait to be woken, unless a launch came meanwhile."""
    _add(shared + _SLEEPERS, 1)
    if _open(shared, _look(shared + _TICKET), thread) or _look(shared + _STOP):
        sleepers = _look(shared + _SLEEPERS)
        if sleepers > 0 and _swap(shared + _SLEEPERS, sleepers, sleepers - 1):
            return
    # Where someone has counted this helper as asleep, the semaphore has been or will be raised.
    _semaphore_wait(shared + _SEMAPHORE)


def _serve(shared: Any, thread: Any) -> None:
    """The life of a helper."""
    looks = 0
    while not _look(shared + _STOP):
        ticket = _look(shared + _TICKET)
        if _open(shared, ticket, thread):
            _help(shared, ticket, thread)
            looks = 0
        elif looks < _SPINS:
            looks += 1
            _pause()
        else:
            _sleep(shared, thread)
            looks = 0
