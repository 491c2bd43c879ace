"""A parameter group: the parameters of a unit that share a dtype, in one flat buffer."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from shoal.errors import WorkError
from shoal.fsdp.entry import Entry
from shoal.fsdp.gradients import GradientBuffers, GradientFormat
from shoal.fsdp.grid import Grid
from shoal.fsdp.lane import Task
from shoal.fsdp.lanes import Lanes
from shoal.fsdp.layout import GlobalLayout
from shoal.fsdp.placement import Placements, Replicate
from shoal.fsdp.precision import MixedPrecision
from shoal.fsdp.quantized import QuantizedWeights, check_quantized
from shoal.fsdp.share import Share
from shoal.fsdp.slot import Slot
from shoal.fsdp.use import Use
from shoal.fsdp.weights import WeightBuffers, Weights
from shoal.ops.mxfp8 import BLOCK

_logger = logging.getLogger(__name__)

_PADDING_WORTH_A_WARNING = 1 << 20
"""Elements."""

_GROUP_ATTRIBUTE = "_shoal_group"
"""Where a parameter of a group points to the group, weakly."""


class ParameterGroup:
    """Buffers of the parameters that one collective moves together.

    ``slots`` gives for each parameter the places where it is registered, the same on every rank.
    """

    def __init__(
        self,
        slots: Sequence[tuple[Slot, ...]],
        *,
        grid: Grid,
        placements: Placements,
        precision: MixedPrecision,
        grad_divisor: float,
        lanes: Lanes,
        share: Share,
        is_copy: bool = False,
        is_quantized: bool = False,
    ) -> None:
        originals = [places[0].parameter for places in slots]
        compute_dtype = precision.compute or originals[0].dtype
        self.grid = grid
        self.is_copy = is_copy
        """Whether ranks of another mesh stand for these parameters."""
        self.placements = placements
        self.share = share
        if is_quantized:
            for (slot, *_), original in zip(slots, originals, strict=True):
                check_quantized(slot.path, original.shape, compute_dtype, grid.device.type)
        self.layout = GlobalLayout.build(
            [original.shape for original in originals],
            math.prod(grid.sizes),
            block_rows=BLOCK if is_quantized else 1,
        )
        self._warn_of_padding()
        main_dtype, where = precision.main_weights, (self.layout, grid, placements)
        self.weights: Weights = (
            QuantizedWeights(*where, main_dtype)
            if is_quantized
            else WeightBuffers(*where, main_dtype, compute_dtype)
        )
        self.gradients: GradientBuffers | None = None
        self._format = GradientFormat(
            partial=compute_dtype,
            final=precision.main_gradients or compute_dtype,
            reduce=precision.reduce,
            divisor=grad_divisor,
        )
        self._lanes = lanes
        self._filled = all(original.device.type != "meta" for original in originals)
        self._watched: set[int] = set()
        self._gather: Task | None = None
        self._installed = False
        self._reduction: Task | None = None
        places = enumerate(zip(slots, originals, strict=True))
        self.entries = tuple(self._shard(i, slot, original) for i, (slot, original) in places)
        if any(entry.local.requires_grad for entry in self.entries):
            self.gradients = self._make_gradients()
        self.weights.changed()
        self.weights.release()

    @property
    def num_trainable(self) -> int:
        """Entries that want a gradient, as of the last ``follow_flags``."""
        return sum(entry.compute.requires_grad for entry in self.entries)

    @property
    def missing(self) -> list[Entry]:
        """Entries that want a gradient and did not get one in the present backward."""
        return [
            entry
            for index, entry in enumerate(self.entries)
            if entry.compute.requires_grad
            and not (self.gradients and self.gradients.has_arrived(index))
        ]

    @property
    def in_use(self) -> bool:
        """Whether the module is in forward or backward."""
        return self._installed

    @property
    def unfinished(self) -> bool:
        """Whether contributions wait for the last microbatch or for the end of backward."""
        if self.gradients is None:
            return False
        return self.gradients.unfinished or self._reduction is not None

    @property
    def primary(self) -> bool:
        """Whether this rank is the first of those with equal main weights, and stands for them."""
        return not self.is_copy and self.replica == 0

    @property
    def replica(self) -> int:
        """Which of the ranks with equal main weights this is, the outer axis counting most."""
        place = 0
        axes = zip(self.placements.optimizer, self.grid.ranks, self.grid.sizes, strict=True)
        for kind, rank, size in axes:
            if isinstance(kind, Replicate):
                place = place * size + rank
        return place

    @property
    def num_replicas(self) -> int:
        """Ranks of the mesh with equal main weights, this one included."""
        kinds = zip(self.placements.optimizer, self.grid.sizes, strict=True)
        return math.prod(size for kind, size in kinds if isinstance(kind, Replicate))

    def follow_flags(self, arrive: Callable[[int, torch.Tensor], None]) -> None:
        """Take over ``requires_grad`` of the local parameters, which may have changed at rest.

        ``arrive`` is called with an entry's index and the gradient that backward made for it. It
        must not keep this group alive.
        """
        for index, entry in enumerate(self.entries):
            if entry.local.requires_grad == entry.compute.requires_grad and index in self._watched:
                continue
            entry.compute.requires_grad_(entry.local.requires_grad)
            if entry.local.requires_grad:
                if index not in self._watched:
                    self._watched.add(index)
                    entry.watch(partial(arrive, index))
                if self.gradients is None:
                    self.gradients = self._make_gradients()

    def start_gather(self, use: Use) -> None:
        """Bring what ``use`` needs of the weights on its way, unless it already is."""
        if self._gather is not None:
            return
        if not self._filled:
            raise WorkError(
                "Weights that were built on the meta device have no values yet: fill each sharded "
                "parameter and call sync_weights."
            )
        self._gather = self._lanes.gather.start(self.weights.gather(use))

    def open(self, use: Use) -> None:
        """Have the whole weights in place and registered."""
        self.start_gather(use)
        assert self._gather is not None
        self._gather.finish()
        if not self._installed:
            for entry in self.entries:
                entry.check()
            self._installed = True
            for entry in self.entries:
                entry.open()

    def close(self) -> None:
        """Register the main weights and let the whole weights go."""
        if self._installed:
            self._installed = False
            for entry in self.entries:
                entry.close()
        if self._gather is not None:
            self._gather.finish()
            self._gather = None
            self._lanes.gather.run(self.weights.release)

    def sync(self) -> None:
        """The main weights changed: compute takes the new ones from its next use on."""
        if self._installed:
            raise WorkError("Main weights changed while their module was in forward or backward.")
        self.close()
        self._filled = True
        self.weights.changed()

    def start_reduce(self, *, is_last: bool) -> None:
        """Bring the gradients that backward made on their way to the other ranks."""
        if self.gradients is not None:
            self.finish_reduce()
            keep = self.gradients.collected
            chain = self.gradients.reduce(is_last=is_last)
            self._reduction = self._lanes.reduce.start(chain, keep)

    def advance_reduce(self) -> bool:
        """Let a reduction of several stages go on to its next stage; whether there is one."""
        if self._reduction is not None and not self._reduction.advance():
            self._reduction = None
        return self._reduction is not None

    def finish_reduce(self) -> None:
        """Have the reduced gradients in place."""
        if self._reduction is not None:
            self._reduction.finish()
            self._reduction = None

    def discard(self) -> None:
        """Drop all gradients, also those under way."""
        self.finish_reduce()
        if self.gradients is not None:
            self.gradients.discard()
        for entry in self.entries:
            entry.compute.grad = None

    def _warn_of_padding(self) -> None:
        payload = sum(shape.numel() for shape in self.layout.shapes)
        padding = self.layout.size - payload
        if padding > max(payload, _PADDING_WORTH_A_WARNING):
            _logger.warning(
                "row sizes of a parameter group have a large common multiple: %d elements of "
                "padding for %d of parameters; make units of modules with like row sizes",
                padding,
                payload,
            )

    def _shard(self, index: int, slots: tuple[Slot, ...], original: nn.Parameter) -> Entry:
        held, rows = self.weights.main.rows(index), self.weights.main.view(index)
        if original.device.type != "meta":
            rows.copy_(original.detach()[held.start : held.stop])
        entry = Entry.of(slots, original, rows=rows, whole=self.weights.whole.view(index))
        for parameter in (entry.local, entry.compute):
            setattr(parameter, _GROUP_ATTRIBUTE, weakref.ref(self))
        return entry

    def _make_gradients(self) -> GradientBuffers:
        return GradientBuffers(
            layout=self.layout,
            grid=self.grid,
            placements=self.placements,
            format_=self._format,
            parameters=[entry.local for entry in self.entries],
        )


def group_of(parameter: torch.Tensor) -> ParameterGroup | None:
    """The group that a parameter belongs to, as main weights or as compute weights; or none."""
    reference: weakref.ref[ParameterGroup] | None = getattr(parameter, _GROUP_ATTRIBUTE, None)
    return reference() if reference is not None else None
