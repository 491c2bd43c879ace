"""Launches recorded once and run again in one go, as a decode step is for each number of rows.

Preparing a launch from Python takes about as long as a small kernel runs. Where a computation is
the same launches each time, on the same memory, it is enough to record it and put new numbers where
its inputs lie:

    with recording(arena) as program:
        logits = forward(rows)         computes, and writes down addresses and numbers
    rows.tokens.copy_(...)
    program.run()                      the same launches again: ``logits`` holds the new results

Only kernels of this package are recorded. Views of tensors are addresses, hence free; any other
computation by torch raises ``CannotRecord``, since a later run would leave it out. What is
allocated while recording comes from an arena, where its place is used again once it was dropped.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.ops.fixed.kernel import LAUNCHES, Launch
from shoal.ops.fixed.threads import helpers, num_threads


class CannotRecord(Exception):
    """The computation is not made of this package's kernels alone."""


class Program:
    """Recorded launches; made by ``recording``."""

    def __init__(self, arena: Arena) -> None:
        self.launches: list[Launch] = []
        self._arena = arena  # holds what they compute on

    @cached_property
    def _table(self) -> npt.NDArray[np.int64]:
        return np.array([list(launch.entry) for launch in self.launches], dtype=np.int64)

    def run(self) -> None:
        """Run all launches in order; the interpreter is free for other threads meanwhile."""
        helpers().run(self._table.ctypes.data, len(self.launches), num_threads())


@contextmanager
def recording(arena: Arena) -> Iterator[Program]:
    """Record what is computed in the block, on this thread, to a program that may then be run.

    Raises CannotRecord, from within the block, for what is no kernel of this package.
    """
    program = Program(arena)
    token = LAUNCHES.set(program.launches)
    try:
        with _Guard(arena):
            yield program
    finally:
        LAUNCHES.reset(token)


class Arena:
    """Memory for what programs compute on; only one of those that share it runs at a time.

    A block whose tensors are gone is given to the next tensor of about its size. What a program
    leaves for others to read after its run must be kept as a tensor, or the next may overwrite it.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[npt.NDArray[np.uint8]]] = defaultdict(list)
        self._blocks: list[npt.NDArray[np.uint8]] = []

    @property
    def num_bytes(self) -> int:
        """Memory taken so far."""
        return sum(block.nbytes for block in self._blocks)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A new tensor, whose storage keeps its block in use until all views of it are gone."""
        count = math.prod(shape)
        # Powers of two, so that programs for a few rows more or less share their blocks.
        size = 1 << max(count * dtype.itemsize - 1, 63).bit_length()
        free = self._free[size]
        if free:
            block = free.pop()
        else:
            block = np.empty(size, np.uint8)
            self._blocks.append(block)
        lent = block[:]
        weakref.finalize(lent, free.append, block)
        return torch.from_numpy(lent)[: count * dtype.itemsize].view(dtype).view(tuple(shape))


class _Guard(TorchDispatchMode):
    """Lets views pass, takes what is allocated from the arena, and stops everything else."""

    def __init__(self, arena: Arena) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._arena = arena

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        if func in _ALLOCATIONS:
            return self._allocate(func, args, keywords)
        aliases = [result.alias_info for result in func._schema.returns]
        if aliases and all(alias is not None and not alias.is_write for alias in aliases):
            return func(*args, **keywords)
        raise CannotRecord(f"{func} is computed by torch")

    def _allocate(self, func: Any, args: Any, keywords: Any) -> torch.Tensor:
        aten = torch.ops.aten
        like = args[0] if func is not aten.empty.memory_format else None
        shape = (
            args[0] if like is None else args[1] if func is aten.new_empty.default else like.shape
        )
        dtype = keywords.get("dtype") or (torch.get_default_dtype() if like is None else like.dtype)
        return self._arena.empty(shape, dtype)


_ALLOCATIONS = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.empty_like.default,
}
