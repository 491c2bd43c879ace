"""Shared memory through which ranks read each other's partial results.

A block has one part for each rank, which only that rank writes. Blocks go round: of a size class,
the one that was used least recently is taken again, and whoever is about to write to it first sees
that every rank has finished the deed that used it.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from dataclasses import dataclass

import torch

from shoal.fsdp.memory_file import MemoryFile, tensor_at, unmap

_SMALLEST_PART = 4096
_KEPT = 1
"""Used blocks of a class left alone when another is wanted: their deeds may well be under way."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class Block:
    """Memory for one input of one deed, or for its sums."""

    address: int
    part_capacity: int
    free_after: int = 0
    """Deeds that every rank must have finished before the block may be written."""

    def part(self, rank: int, numel: int, dtype: torch.dtype, *, offset: int = 0) -> torch.Tensor:
        """One rank's part as a flat tensor, from ``offset`` bytes on."""
        address = self.address + rank * self.part_capacity + offset
        return tensor_at(address, numel, dtype, keep=self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """Where a deed's inputs lie: at the same place in every rank's part of a block."""

    block: Block
    offset: int = 0
    lent: bool = False
    """Whether this rank's input lies there already."""


class Blocks:
    """The blocks of one axis, as one rank has them; all ranks take the same blocks in step."""

    def __init__(self, file: MemoryFile, region: int, size: int) -> None:
        """``region`` is where in the file the blocks begin."""
        self._file = file
        self._region_end = region
        self._size = size
        self._used: defaultdict[int, deque[Block]] = defaultdict(deque)

    def take(self, nbytes: int) -> Block:
        """A block with parts of at least ``nbytes``."""
        part_capacity = max(_SMALLEST_PART, 1 << max(nbytes - 1, 0).bit_length())
        used = self._used[part_capacity]
        if len(used) > _KEPT:
            return used.popleft()
        capacity = part_capacity * self._size
        block = Block(self._file.map(self._region_end, capacity), part_capacity)
        weakref.finalize(block, unmap, block.address, capacity).atexit = False
        self._region_end += capacity
        return block

    def give_back(self, block: Block, sequence: int) -> None:
        """The block serves deed number ``sequence`` and is free once every rank finished that."""
        block.free_after = sequence + 1
        self._used[block.part_capacity].append(block)
