"""The flat buffers of one unit, as the adapter lays them out, without allocating any."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import torch

from shoal.fsdp import GlobalLayout, Partial, Placement, Placements, Replicate, Shard
from shoal.ops.mxfp8 import BLOCK
from shoal.plan.moves import Move, Ways

Layers = Literal["dense", "expert"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Formats:
    """Formats of a group's buffers."""

    main_weights: torch.dtype
    compute: torch.dtype
    gradients: torch.dtype
    reduce: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The parameters of one unit; all of the decoder's have one dtype and want gradients."""

    unit: str
    """Name of the unit's module; empty for the root."""

    layers: Layers
    """Which placements and which mesh it is sharded by."""

    names: tuple[str, ...]
    """Of the parameters, in the order of the layout."""

    layout: GlobalLayout
    placements: Placements
    sizes: tuple[int, int]
    """Ranks on the outer and on the inner axis."""

    formats: Formats

    hidden: frozenset[int] = frozenset()
    """Which parameters stack matrices that Muon orthogonalizes whole; none for other kinds."""

    is_copy: bool = False
    """Whether another stage holds the same parameters and stands for them."""

    is_quantized: bool = False
    """Whether they travel in MXFP8, in planes for forward and for backward."""

    is_recomputed: bool = False
    """Whether backward computes the forward again, and so takes both."""

    def run(self, placements: Sequence[Placement]) -> int:
        """Elements that one rank holds under ``placements``; every rank holds as many."""
        return self._ways.held([isinstance(kind, Shard) for kind in placements])

    @property
    def kind(self) -> tuple[Any, ...]:
        """Groups of one stage with equal kinds have equal buffers and equal traffic."""
        return id(self.layout), self.layers, self.hidden, self.is_quantized

    @property
    def main_weight_bytes(self) -> int:
        """Bytes of the weights that the optimizer updates."""
        return self.run(self.placements.optimizer) * self.formats.main_weights.itemsize

    @property
    def is_aliased(self) -> bool:
        """Whether compute uses the main weights themselves."""
        if self.is_quantized:
            return False
        same_place = self.run(self.placements.parameter) == self.run(self.placements.optimizer)
        return same_place and self.formats.main_weights is self.formats.compute

    @property
    def compute_weight_bytes(self) -> int:
        """Bytes of the weights for compute between their uses."""
        numel = self.run(self.placements.parameter)
        if self.is_quantized:
            return 2 * plane_bytes(numel)
        return 0 if self.is_aliased else numel * self.formats.compute.itemsize

    @property
    def whole_weight_bytes(self) -> int:
        """Bytes of the gathered weights, which live only while in use; 0 where they rest whole.

        Of those that travel in MXFP8 what products see, and for a second forward the planes too.
        """
        whole = self.layout.size * self.formats.compute.itemsize
        if self.is_quantized:
            return whole + (self.arriving_bytes if self.is_recomputed else 0)
        return 0 if self._rest_whole else whole

    @property
    def arriving_bytes(self) -> int:
        """Bytes of the weights on their way to a backward; 0 where they rest whole."""
        if not self.is_quantized:
            return self.whole_weight_bytes
        return 0 if self._rest_whole else self._num_planes * plane_bytes(self.layout.size)

    @property
    def _rest_whole(self) -> bool:
        return self.run(self.placements.parameter) == self.layout.size

    @property
    def _num_planes(self) -> int:
        """Planes that a backward takes."""
        return 2 if self.is_recomputed else 1

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients that the optimizer sees."""
        return self.run(self.placements.optimizer) * self.formats.gradients.itemsize

    @property
    def partial_bytes(self) -> int:
        """Bytes of the contribution that backward makes."""
        return self.layout.size * self.formats.compute.itemsize

    def accumulation_bytes(self, num_microbatches: int) -> int:
        """Bytes of a buffer for sums over microbatches apart from the final gradients."""
        if self._is_direct or (self._is_deferred and num_microbatches == 1):
            return 0
        between = self.run(self.placements.gradient)
        apart = between != self.run(self.placements.optimizer)
        return between * self.formats.gradients.itemsize if apart else 0

    def collected_bytes(self, num_microbatches: int) -> int:
        """Bytes of what one backward collects, where that is no sum over microbatches."""
        summed = self._is_deferred and num_microbatches > 1
        return 0 if summed else self.partial_bytes

    def reducing_bytes(self, num_microbatches: int) -> int:
        """Bytes that its reduction takes besides what was collected: what peers send, and sums
        on their way to a second axis."""
        moves = [*self.microbatch_moves(), *self.final_moves(num_microbatches)]
        if not moves:
            return 0
        first, further = moves[0], moves[1:]
        received = first.payload_bytes * (1 if first.operation == "reduce_scatter" else 2)
        return received + max((move.payload_bytes for move in further), default=0)

    @property
    def largest_gradient_bytes(self) -> int:
        """Bytes of the largest parameter's gradient as backward makes it."""
        return max(shape.numel() for shape in self.layout.shapes) * self.formats.compute.itemsize

    def replica(self, place: tuple[int, int]) -> tuple[int, int]:
        """Which of the ranks with equal main weights is at ``place``, and how many these are."""
        replica, count = 0, 1
        for kind, size, number in zip(self.placements.optimizer, self.sizes, place, strict=True):
            if isinstance(kind, Replicate):
                replica, count = replica * size + number, count * size
        return replica, count

    def held_rows(self, place: tuple[int, int]) -> Iterator[int]:
        """How many rows of each parameter the rank at ``place`` (outer, inner) holds."""
        sharded = [isinstance(kind, Shard) for kind in self.placements.optimizer]
        start, stop = self.layout.run(sharded, self.sizes, place)
        for index in range(len(self.layout.shapes)):
            rows = self.layout.rows(index, start, stop)
            yield rows.stop - rows.start

    def refresh_moves(self) -> list[Move]:
        """Collectives that bring stepped main weights to compute, once a step."""
        if self.is_aliased:
            return []
        before, after = self.placements.optimizer, self.placements.parameter
        return self._weight_gathers(before, after, num_planes=2)

    def forward_moves(self) -> list[Move]:
        """Collectives of the weights for a forward, once a microbatch."""
        whole = (Replicate(), Replicate())
        return self._weight_gathers(self.placements.parameter, whole, num_planes=1)

    def backward_moves(self) -> list[Move]:
        """Collectives of the weights for a backward, once a microbatch."""
        whole = (Replicate(), Replicate())
        return self._weight_gathers(self.placements.parameter, whole, num_planes=self._num_planes)

    def microbatch_moves(self) -> list[Move]:
        """Collectives of the gradients after each microbatch."""
        contribution = (Partial("avg"), Partial("avg"))
        if self._is_deferred:
            return []
        compute, further = self.formats.compute, self.formats.reduce
        return self._ways.reductions(contribution, self.placements.gradient, compute, further)

    def final_moves(self, num_microbatches: int) -> list[Move]:
        """Further collectives of the gradients after the last microbatch."""
        if self._is_direct:
            return []
        accumulated = not self._is_deferred or num_microbatches > 1
        dtype = self.formats.gradients if accumulated else self.formats.compute
        before, after = self.placements.gradient, self.placements.optimizer
        return self._ways.reductions(before, after, dtype, self.formats.reduce)

    def update_moves(self) -> list[Move]:
        """Collectives of Muon's updates, once a step: to whole matrices, and back to rows."""
        if not self.hidden:
            return []
        everywhere, held = (Replicate(), Replicate()), self.placements.optimizer
        dtype = self.formats.compute
        back = self._ways.reductions((Partial("sum"), Partial("sum")), held, dtype, dtype)
        return [*self._ways.gathers(held, everywhere, dtype), *back]

    @property
    def _ways(self) -> Ways:
        return _ways(self.layout.size, self.sizes)

    @property
    def _is_direct(self) -> bool:
        """Whether each contribution goes straight to the final gradients."""
        gradient, optimizer = self.placements.gradient, self.placements.optimizer
        return all(gradient[axis] == optimizer[axis] for axis in self._ways.active)

    @property
    def _is_deferred(self) -> bool:
        """Whether nothing is reduced before the last microbatch."""
        gradient = self.placements.gradient
        return not self._is_direct and all(
            isinstance(gradient[axis], Partial) for axis in self._ways.active
        )

    def _weight_gathers(
        self, before: Sequence[Placement], after: Sequence[Placement], *, num_planes: int
    ) -> list[Move]:
        """Collectives of weights in the format in which they travel; each plane on its own."""
        moves = self._ways.gathers(before, after, self.formats.compute)
        if not self.is_quantized:
            return moves
        itemsize = self.formats.compute.itemsize
        return num_planes * [
            replace(move, payload_bytes=plane_bytes(move.payload_bytes // itemsize))
            for move in moves
        ]


@lru_cache(maxsize=4096)
def _ways(numel: int, sizes: tuple[int, int]) -> Ways:
    """One object for all groups that are alike: a search asks for very many."""
    return Ways(numel=numel, sizes=sizes)


def plane_bytes(numel: int) -> int:
    """Bytes of ``numel`` elements in one plane of MXFP8: whole blocks."""
    return numel // BLOCK * (BLOCK + 1)


def counted(groups: Sequence[Group]) -> list[tuple[Group, int]]:
    """One group of each kind, and how many there are."""
    examples = {group.kind: group for group in groups}
    counts = Counter(group.kind for group in groups)
    return [(examples[kind], count) for kind, count in counts.items()]
