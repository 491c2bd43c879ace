"""Where each tensor of a group lies in the group's flat buffer, and which part a rank holds.

The buffer is cut into equal shards, and no shard border may fall inside a row of a tensor. With
``chunk`` the least common multiple of all row sizes, shards of whole chunks keep to that when every
tensor starts at a multiple of its row size, since the chunk borders are multiples of it as well.
A tensor smaller than a chunk (a fragment) fills a gap that larger ones leave::

    shapes (2,6) (4,4) (4,4) (1,2) (1,6), 5 ranks, chunk 12, total 60

    0           12          24          36          48          60
    │ (2,6)     │ (4,4) ....│...│..│(4,4) ..........│(1,6)│     │
                                 28 (1,2)
                                    32 the tail part of the second (4,4) shares the chunk

With blocks of several rows that must stay together, each block counts as a row: of 32 rows where
these share the scales of MXFP8 (``shoal.fsdp.planes``).

The layout depends on the number of data-parallel ranks, not on which axes are sharded; so moving
between placements only slices and joins. Algorithm: Megatron-FSDP v2, ``GlobalLayout``, with its
``BlockAtomic``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shoal.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The dim-0 rows of one tensor that lie in a run of the buffer."""

    start: int
    """First row."""

    stop: int
    """One past the last row; equal to ``start`` where there is none."""

    offset: int
    """Where the first row lies, counted in elements from the start of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalLayout:
    """Offsets of tensors in one flat buffer; build it with ``GlobalLayout.build``."""

    shapes: tuple[torch.Size, ...]
    """Shapes of the whole tensors."""

    offsets: tuple[int, ...]
    """Where each tensor starts, in elements."""

    size: int
    """Elements of the whole buffer, gaps and padding included."""

    @classmethod
    def build(
        cls, shapes: Sequence[Sequence[int]], num_ranks: int, *, block_rows: int = 1
    ) -> GlobalLayout:
        """Lay out tensors of ``shapes``, in this order, for ``num_ranks`` data-parallel ranks.

        No run of ``block_rows`` rows, counted from the start of each tensor, is ever split.

        Raises:
            ConfigError: for a tensor without dimensions or with an empty one.
        """
        whole = tuple(torch.Size(shape) for shape in shapes)
        offsets, end, chunk = _Packing(whole, block_rows).offsets()
        return cls(shapes=whole, offsets=offsets, size=_round_up(end, chunk * num_ranks))

    def row_numel(self, index: int) -> int:
        """Elements in one row of a tensor."""
        return _row_numel(self.shapes[index])

    def rows(self, index: int, start: int, stop: int) -> Rows:
        """The rows of tensor ``index`` inside the run ``start`` to ``stop`` of the buffer."""
        row = self.row_numel(index)
        offset = self.offsets[index]
        numel = self.shapes[index].numel()
        first = min(max(start - offset, 0), numel)
        last = max(min(stop - offset, numel), first)
        place = offset + first - start if last > first else 0
        return Rows(start=first // row, stop=last // row, offset=place)

    def run(
        self, sharded: Sequence[bool], sizes: Sequence[int], ranks: Sequence[int]
    ) -> tuple[int, int]:
        """The run of the buffer held at one place of a mesh, as start and stop.

        The arguments go by axis, outer to inner: whether it is sharded, its size, the place on it.
        The inner axis makes the large parts, the outer ones cut them again.
        """
        start, length = 0, self.size
        for split, size, rank in reversed(list(zip(sharded, sizes, ranks, strict=True))):
            if split:
                length //= size
                start += rank * length
        return start, start + length


def check_rows(field: str, shape: torch.Size) -> None:
    """Raise ``ConfigError`` for a tensor that cannot be split by rows."""
    if not shape or 0 in shape[1:]:
        raise ConfigError(
            field,
            tuple(shape),
            "a flat buffer holds rows, and a tensor of this shape has none",
            "Give it a first dimension and rows of at least one element",
        )


class _Packing:
    """One run of the packing algorithm."""

    def __init__(self, shapes: tuple[torch.Size, ...], block_rows: int) -> None:
        for shape in shapes:
            check_rows("parameter", shape)
        # A block of rows, also one that the tensor's end cuts short, is to the packing one row.
        self._rows = [block_rows * _row_numel(shape) for shape in shapes]
        self._numels = [
            _round_up(shape.numel(), row) for shape, row in zip(shapes, self._rows, strict=True)
        ]
        self._chunk = math.lcm(*self._rows)
        self._placed: dict[int, int] = {}

    def offsets(self) -> tuple[tuple[int, ...], int, int]:
        """Offsets in declaration order, the end of the last tensor, and the chunk."""
        indices = range(len(self._numels))
        regular = [i for i in indices if self._numels[i] >= self._chunk]
        self._fragments = sorted(
            (i for i in indices if self._numels[i] < self._chunk), key=lambda i: -self._numels[i]
        )
        cursor = 0
        for position, index in enumerate(regular):
            if index not in self._placed:
                cursor = self._place_regular(index, regular[position + 1 :], cursor)
        for index in self._unplaced_fragments():
            offset = _round_up(cursor, self._rows[index])
            self._placed[index] = offset
            cursor = offset + self._numels[index]
        return tuple(self._placed[i] for i in indices), cursor, self._chunk

    def _place_regular(self, index: int, later: list[int], cursor: int) -> int:
        """Place a tensor at the cursor and fill the gap after it; returns the new cursor."""
        self._placed[index] = cursor
        gap_start = cursor + self._numels[index]
        remainder = gap_start % self._chunk
        if remainder == 0:
            return gap_start
        gap_stop = cursor = _round_up(gap_start, self._chunk)
        conjugate = self._conjugate(later, remainder)
        if conjugate is not None:
            gap_stop -= self._numels[conjugate] % self._chunk
            self._placed[conjugate] = gap_stop
            cursor = gap_stop + self._numels[conjugate]
        self._fill(gap_start, gap_stop)
        return cursor

    def _conjugate(self, later: list[int], remainder: int) -> int | None:
        """The first tensor whose part beyond whole chunks fits beside ``remainder``."""
        for index in later:
            rest = self._numels[index] % self._chunk
            if index not in self._placed and 0 < rest <= self._chunk - remainder:
                return index
        return None

    def _fill(self, start: int, stop: int) -> None:
        for index in self._unplaced_fragments():
            offset = _round_up(start, self._rows[index])
            if offset + self._numels[index] <= stop:
                self._placed[index] = offset
                start = offset + self._numels[index]

    def _unplaced_fragments(self) -> list[int]:
        return [index for index in self._fragments if index not in self._placed]


def _row_numel(shape: torch.Size) -> int:
    return math.prod(shape[1:])


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
