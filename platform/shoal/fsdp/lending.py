"""Shared memory through which ranks read each other's partial results.

A block has one part for each rank, which only that rank writes. Of the blocks of a size class that
have served, the last but one is taken again: its deed is most likely over, and so is the fear that
a peer still reads it, which whoever is about to write checks. Blocks that served before those two
were many at once; they keep their addresses and give their pages back.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from dataclasses import dataclass

import torch

from shoal.fsdp.memory_file import MemoryFile, tensor_at, unmap

_SMALLEST_PART = 4096
_NUM_WARM = 2
"""Idle blocks of a class that keep their pages."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class Block:
    """Memory for one input of one deed, or for its sums."""

    offset: int
    """Where in the file it begins."""
    address: int
    part_capacity: int
    free_after: int = 0
    """Deeds that every rank must have finished before the block may be written."""
    warm: bool = True
    """Whether it may have pages."""

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

    def __init__(self, file: MemoryFile, region: int, rank: int, size: int) -> None:
        """``region`` is where in the file the blocks begin."""
        self._file = file
        self._region_end = region
        self._rank = rank
        self._size = size
        self._idle: defaultdict[int, list[Block]] = defaultdict(list)

    def take(self, nbytes: int) -> Block:
        """A block with parts of at least ``nbytes``."""
        part_capacity = max(_SMALLEST_PART, 1 << max(nbytes - 1, 0).bit_length())
        idle = self._idle[part_capacity]
        if len(idle) >= _NUM_WARM:
            block = idle.pop(-_NUM_WARM)
            block.warm = True
            return block
        capacity = part_capacity * self._size
        block = Block(
            offset=self._region_end,
            address=self._file.map(self._region_end, capacity),
            part_capacity=part_capacity,
        )
        weakref.finalize(block, unmap, block.address, capacity).atexit = False
        self._region_end += capacity
        return block

    def give_back(self, block: Block, sequence: int) -> None:
        """The block serves deed number ``sequence`` and is free once every rank finished that."""
        block.free_after = sequence + 1
        self._idle[block.part_capacity].append(block)

    def trim(self, num_finished: int) -> None:
        """Free this rank's pages of blocks that are too many; every rank finished so many deeds."""
        for part_capacity, idle in self._idle.items():
            for block in idle[:-_NUM_WARM]:
                if block.warm and block.free_after <= num_finished:
                    block.warm = False
                    self._file.punch(block.offset + self._rank * part_capacity, part_capacity)
