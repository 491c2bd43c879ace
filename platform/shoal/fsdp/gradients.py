"""The gradient buffers of a parameter group, from a contribution to the final gradient.

    backward ─► partial ──(each microbatch)──► accumulation ──(last microbatch)──► final
                whole                          gradient placement     optimizer placement
                compute dtype                  main gradient dtype                 the same

A way whose two ends agree is no way: with ZeRO-2 and 3 the partial goes straight to ``final``; with
DDP and ZeRO-1 backward adds straight to the accumulation, and with a single microbatch the partial
goes straight to ``final``. Only ``final`` exists between steps; the others are lent by the
communicator that reduces them, or are the memory of ``final`` where placements allow it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from shoal.fsdp.buffer import FlatBuffer, move, run_of
from shoal.fsdp.communicator import Pending
from shoal.fsdp.grid import Grid
from shoal.fsdp.layout import GlobalLayout
from shoal.fsdp.placement import Partial, Placement, Placements
from shoal.fsdp.reduction import Reduction


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientFormat:
    """Formats and scale of a group's gradients."""

    partial: torch.dtype
    """What backward makes, and what travels."""

    final: torch.dtype
    """Accumulation and final gradient."""

    reduce: torch.dtype
    """Sums over ranks."""

    divisor: float
    """Each contribution is divided by this, beyond the average over ranks."""


class GradientBuffers:
    """Gradients of a group; parameters go by their index in the layout."""

    def __init__(
        self,
        *,
        layout: GlobalLayout,
        grid: Grid,
        placements: Placements,
        format_: GradientFormat,
        parameters: Sequence[nn.Parameter],
    ) -> None:
        self._layout = layout
        self._grid = grid
        self._format = format_
        self._parameters = tuple(parameters)
        self._whole: tuple[Placement, ...] = tuple(Partial("avg") for _ in placements.axes)
        self._between = placements.gradient
        active = grid.active
        self._direct = all(placements.gradient[a] == placements.optimizer[a] for a in active)
        self._deferred = not self._direct and all(
            isinstance(placements.gradient[a], Partial) for a in active
        )
        self.final = FlatBuffer.allocate(
            layout, grid, placements.optimizer, format_.final, grid.local.allocate
        )
        self._views = [self.final.view(index) for index in range(len(parameters))]
        self._partial: FlatBuffer | None = None
        self._accumulation: FlatBuffer | None = None
        self._accumulated = False
        self._arrived: set[int] = set()
        for parameter in parameters:
            parameter.grad_dtype = None  # the gradient's dtype need not be the weight's

    @property
    def unfinished(self) -> bool:
        """Whether contributions wait for the last microbatch."""
        return self._accumulation is not None

    @property
    def collected(self) -> FlatBuffer | None:
        """What ``reduce`` will read from."""
        return self._partial if self._partial is not None else self._accumulation

    @property
    def num_arrived(self) -> int:
        """Parameters whose gradient this backward has brought."""
        return len(self._arrived)

    def has_arrived(self, index: int) -> bool:
        """Whether this backward has brought the gradient of a parameter."""
        return index in self._arrived

    def collect(self, index: int, gradient: torch.Tensor, *, is_last: bool) -> None:
        """Take in what backward made for the whole of one parameter."""
        gradient = gradient.detach()
        buffer = self._collecting(is_last)
        view = buffer.view(index)
        earlier = buffer is self._accumulation and self._accumulated
        if earlier or index in self._arrived:
            view.add_(gradient)
        else:
            view.copy_(gradient)
        self._arrived.add(index)

    def reduce(self, *, is_last: bool) -> Iterator[Pending]:
        """Bring what was collected on its way; collects are over for this backward."""
        self._arrived.clear()
        self._accumulated = self._accumulation is not None
        if self._partial is not None:
            yield from self._reduce_partial()
        if is_last and self._accumulation is not None:
            yield from self._reduce_accumulation()

    def discard(self) -> None:
        """Forget every contribution and gradient."""
        self._arrived.clear()
        self._accumulated = False
        self._partial = self._accumulation = None
        for parameter in self._parameters:
            parameter.grad = None

    def _collecting(self, is_last: bool) -> FlatBuffer:
        """Where this backward's gradients go."""
        if self._deferred and (self._accumulation is not None or not is_last):
            if self._accumulation is None:
                self._accumulation = self._zero_frozen(self._new_accumulation())
            return self._accumulation
        if self._partial is None:
            self._partial = self._zero_frozen(self._lent(self._whole, self._format.partial))
        return self._partial

    def _reduce_partial(self) -> Iterator[Pending]:
        partial, self._partial = self._partial, None
        assert partial is not None
        if self._direct or self._deferred:
            return self._finalize(partial, self._format.divisor)
        add = self._accumulation is not None
        if self._accumulation is None:
            self._accumulation = self._new_accumulation()
        return move(
            partial,
            self._accumulation,
            Reduction(accumulate_dtype=self._format.reduce, divisor=self._format.divisor, add=add),
        )

    def _reduce_accumulation(self) -> Iterator[Pending]:
        accumulation, self._accumulation = self._accumulation, None
        assert accumulation is not None
        self._accumulated = False
        return self._finalize(accumulation, self._format.divisor if self._deferred else 1.0)

    def _finalize(self, source: FlatBuffer, divisor: float) -> Iterator[Pending]:
        """Reduce to the final gradient, on top of one that the optimizer has not cleared."""
        chain = move(
            source,
            self.final,
            Reduction(
                accumulate_dtype=self._format.reduce, divisor=divisor, add=self._keep_final()
            ),
        )
        del source  # so that the chain alone holds it
        yield from chain
        for parameter, view in zip(self._parameters, self._views, strict=True):
            if parameter.requires_grad and parameter.grad is not view:
                parameter.grad = view

    def _keep_final(self) -> bool:
        """Whether ``final`` holds a gradient that counts; if so all of it is made to count."""
        if not self._holds_gradient:
            return False
        for parameter, view in zip(self._parameters, self._views, strict=True):
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad is not view:
                view.copy_(parameter.grad)
                parameter.grad = view
        return True

    @property
    def _holds_gradient(self) -> bool:
        return any(parameter.grad is not None for parameter in self._parameters)

    def _new_accumulation(self) -> FlatBuffer:
        start, stop = run_of(self._layout, self._grid, self._between)
        if (start, stop) == (self.final.start, self.final.stop) and not self._holds_gradient:
            data = self.final.data
            return FlatBuffer(
                layout=self._layout, grid=self._grid, placements=self._between, data=data
            )
        return self._lent(self._between, self._format.final)

    def _lent(self, placements: tuple[Placement, ...], dtype: torch.dtype) -> FlatBuffer:
        """A buffer of contributions, from the memory of the first axis that will reduce them."""
        pairs = enumerate(placements)
        memory = self._grid.memory([axis for axis, kind in pairs if isinstance(kind, Partial)])
        return FlatBuffer.allocate(self._layout, self._grid, placements, dtype, memory.lend)

    def _zero_frozen(self, buffer: FlatBuffer) -> FlatBuffer:
        """Parameters that want no gradient contribute zeros, whatever the memory held."""
        for index, parameter in enumerate(self._parameters):
            if not parameter.requires_grad:
                buffer.view(index).zero_()
        return buffer
