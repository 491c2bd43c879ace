"""Kernels: compiled once, kept on disk, and run on the threads of torch.

A kernel's work is cut into tasks that do not touch each other's results, and each thread takes the
next task until none is left:

    launch ── arguments in memory ──► thread 0: task 0, task 2, task 3 …
                                  └─► thread 1: task 1, task 4 …

Which thread computes a task says nothing about the bits of its result. The threads are those of the
OpenMP runtime that torch itself uses, so that no second pool of threads spins beside it, and there
are ``torch.get_num_threads()`` of them.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import struct
from collections.abc import Callable
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from numba import carray  # type: ignore[attr-defined]
from numba.core import caching, ccallback, types

from shoal.ops.fixed.lanes import claim, device

logger = logging.getLogger(__name__)

_SIGNATURE = ((types.CPointer(types.int64),), types.void)
_HEADER = 3  # counter of tasks, counter of threads, number of tasks

Body = Callable[[Any, Any, Any], None]


class Kernel:
    """A compiled function of (task, thread, arguments), run for each task once."""

    def __init__(self, body: Body, capacity: int, name: str) -> None:
        self.name = name
        self._capacity = capacity
        self._entry = _entry(body, capacity)
        self._memory = ctypes.c_int64 * (_HEADER + capacity)

    def __call__(self, tasks: int, *arguments: int) -> None:
        """Run tasks ``0`` to ``tasks - 1``; returns when all are done.

        The body sees ``arguments`` as an array of int64; floats are given as their ``bits``.
        """
        if tasks <= 0:
            return
        assert len(arguments) == self._capacity, f"{self.name} takes {self._capacity} arguments"
        memory = self._memory(0, 0, tasks, *arguments)
        threads = min(torch.get_num_threads(), tasks)
        if threads == 1:
            self._function(ctypes.addressof(memory))
        else:
            _parallel()(self.address, ctypes.addressof(memory), threads, 0)

    @cached_property
    def address(self) -> int:
        """Where the compiled code is; compiles it, or loads it from disk, when asked first."""
        return _compile(self._entry, self.name)

    @cached_property
    def _function(self) -> Callable[[Any], None]:
        return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.address)


def kernel(capacity: int, name: str) -> Callable[[Body], Kernel]:
    """Make a ``Kernel`` of a function of (task, thread, arguments).

    ``capacity`` is the number of arguments, ``name`` is the kernel's own within this package.
    """
    return lambda body: Kernel(body, capacity, name)


@lru_cache(maxsize=256)
def bits(value: float) -> int:
    """``value`` as fp32 for a kernel's argument, which finds it by ``float_of``."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def _entry(body: Body, capacity: int) -> Callable[[Any], None]:
    step = device(body)
    size = _HEADER + capacity

    def entry(memory: Any) -> None:
        header = carray(memory, (size,))
        start = header.ctypes.data
        tasks = header[2]
        thread = claim(start + 8)
        arguments = header[3:]
        task = claim(start)
        while task < tasks:
            step(task, thread, arguments)
            task = claim(start)

    return entry


@cache
def _parallel() -> Callable[[int, int, int, int], None]:
    """``GOMP_parallel`` of the OpenMP runtime that torch is linked with (or its Intel twin)."""
    folder = Path(torch.__file__).parent / "lib"
    library = next(iter(sorted(folder.glob("libtorch_cpu.*"))))
    function = ctypes.CDLL(str(library)).GOMP_parallel
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    function.restype = None
    run: Callable[[int, int, int, int], None] = function
    return run


# --- compiling --------------------------------------------------------------------------------


@cache
def source_hash() -> str:
    """A hash of this package's sources: compiled code of other sources is not used."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


class _OfPackage:
    """What numba's cache asks of a kernel's source, answered for the package as a whole.

    numba would look at the file of the function alone, and miss changes of the functions it calls.
    """

    def get_source_stamp(self) -> str:
        return source_hash()


class _Given(_OfPackage, caching.UserProvidedCacheLocator):
    pass


class _InTree(_OfPackage, caching.InTreeCacheLocator):
    pass


class _UserWide(_OfPackage, caching.UserWideCacheLocator):
    pass


class _Contents(caching.CompileResultCacheImpl):
    _locator_classes = [_Given, _InTree, _UserWide]


class _Cache(caching.FunctionCache):
    _impl_class = _Contents

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        # The name stands for the function, the stamp for its code and for what it calls.
        return sig, codegen.magic_tuple()


class _Function(ccallback.CFunc):
    def enable_caching(self) -> None:
        self._cache = _Cache(self.__wrapped__)  # type: ignore[no-untyped-call]


def _compile(entry: Callable[[Any], None], name: str) -> int:
    entry.__name__ = entry.__qualname__ = name
    function = _Function(entry, _SIGNATURE, locals={}, options={"nogil": True})
    try:
        function.enable_caching()
    except RuntimeError as error:
        logger.warning("kernel %s is compiled at every start: %s", name, error)
    function.compile()
    address = function.address
    assert address is not None
    return address
