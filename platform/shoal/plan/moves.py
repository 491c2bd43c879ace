"""Collectives that bring a flat buffer from one placement to another, as the adapter takes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shoal.fsdp import Partial, Placement, Shard
from shoal.fsdp.ledger import Operation


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One collective on the way of a buffer."""

    operation: Operation
    axis: int
    """0 is the outer axis, 1 the inner one."""

    payload_bytes: int
    """Bytes of the larger side: what is gathered, or what is reduced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """The ways of a buffer over the axes of a mesh; placements are outer to inner."""

    numel: int
    """Elements of the whole buffer."""

    sizes: tuple[int, int]
    """Ranks on the outer and on the inner axis."""

    @property
    def active(self) -> list[int]:
        """Axes with more than one rank, outer to inner."""
        return [axis for axis, size in enumerate(self.sizes) if size > 1]

    def held(self, sharded: Sequence[bool]) -> int:
        """Elements that one rank holds; every rank holds as many."""
        pairs = zip(sharded, self.sizes, strict=True)
        return self.numel // math.prod(size for split, size in pairs if split)

    def gathers(
        self, before: Sequence[Placement], after: Sequence[Placement], dtype: torch.dtype
    ) -> list[Move]:
        """Outer axes first, so that the inner one ends in the whole run."""
        moves = []
        sharded = [isinstance(kind, Shard) for kind in before]
        for axis in self.active:
            if sharded[axis] and not isinstance(after[axis], Shard):
                sharded[axis] = False
                payload = self.held(sharded) * dtype.itemsize
                moves.append(Move(operation="all_gather", axis=axis, payload_bytes=payload))
        return moves

    def reductions(
        self,
        before: Sequence[Placement],
        after: Sequence[Placement],
        dtype: torch.dtype,
        further: torch.dtype,
    ) -> list[Move]:
        """Inner axes first, so that the outer ones carry the smaller part.

        ``further`` is what a first reduction hands to a second one.
        """
        moves = []
        sharded = [isinstance(kind, Shard) for kind in before]
        for axis in reversed(self.active):
            if not isinstance(before[axis], Partial) or isinstance(after[axis], Partial):
                continue
            payload = self.held(sharded) * dtype.itemsize
            sharded[axis] = isinstance(after[axis], Shard)
            operation: Operation = "reduce_scatter" if sharded[axis] else "all_reduce"
            moves.append(Move(operation=operation, axis=axis, payload_bytes=payload))
            dtype = further
        return moves
