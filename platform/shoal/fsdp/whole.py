"""Whole matrices out of the rows that ranks hold, each on one rank, and back to rows.

What is computed of a matrix as a whole, such as its orthogonalization, cannot be computed of rows.
No rank needs all of a group's matrices for it: each matrix has an owner::

    rows, optimizer placement ──gather──► whole ──each rank what it owns──► zeros elsewhere
                                                                               │ sum
    rows, optimizer placement ◄──reduce-scatter, or all-reduce over replicas───┘

One rank's result and the zeros of the others add up to exactly that result, so every rank that
holds a row gets the same bits of it, at every layout and on unlike machines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from shoal.fsdp.buffer import FlatBuffer, move
from shoal.fsdp.grid import Grid
from shoal.fsdp.group import ParameterGroup
from shoal.fsdp.placement import Partial, Placement, Replicate


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """Rows of one parameter of a group that are a matrix of their own."""

    index: int
    """Of the parameter in the group."""

    start: int
    """First row, counted in what the group has of the parameter."""

    stop: int
    """One past the last row."""

    owner: int
    """Place, in the mesh, of the rank that computes it; see ``place_in``."""


def place_in(grid: Grid) -> int:
    """This rank's place among all ranks of a mesh."""
    place = 0
    for size, rank in zip(grid.sizes, grid.ranks, strict=True):
        place = place * size + rank
    return place


def deal(costs: Sequence[float], loads: list[float]) -> list[int]:
    """An owner for each matrix, by its cost: the dearest first, to whom has the least to do.

    ``loads`` has what each place does already, and what it does afterwards.
    """
    owners = [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda number: (-costs[number], number)):
        owner = min(range(len(loads)), key=lambda place: (loads[place], place))
        owners[number] = owner
        loads[owner] += costs[number]
    return owners


def map_matrices(
    group: ParameterGroup,
    rows: Mapping[int, torch.Tensor],
    matrices: Sequence[Matrix],
    function: Callable[[torch.Tensor], torch.Tensor],
    dtype: torch.dtype,
) -> dict[int, torch.Tensor]:
    """What ``function`` makes of each matrix, the rows held here; every rank of the mesh calls it.

    Args:
        group: Whose buffers lay out the rows.
        rows: By parameter, the rows held here of what ``function`` is given; zeros where missing.
        matrices: The same ones on every rank.
        function: From a matrix to one of its shape, both in ``dtype``.
        dtype: What travels.
    """
    held = group.placements.optimizer
    given = _buffer(group, held, dtype)
    given.data.zero_()
    for index, value in rows.items():
        given.view(index).copy_(value)
    whole = given.redistribute([Replicate()] * len(held))
    made = _buffer(group, tuple(Partial("sum") for _ in held), dtype)
    made.data.zero_()
    place = place_in(group.grid)
    for matrix in matrices:
        if matrix.owner == place:
            part = slice(matrix.start, matrix.stop)
            made.view(matrix.index)[part].copy_(function(whole.view(matrix.index)[part]))
    del given, whole
    result = _buffer(group, held, dtype)
    for pending in move(made, result):
        pending.wait()
    return {index: result.view(index) for index in rows}


def num_places(grid: Grid) -> int:
    """Ranks of a mesh."""
    return math.prod(grid.sizes)


def _buffer(
    group: ParameterGroup, placements: tuple[Placement, ...], dtype: torch.dtype
) -> FlatBuffer:
    memory = group.grid.local.allocate
    return FlatBuffer.allocate(group.layout, group.grid, placements, dtype, memory)
