"""A group's flat buffer as one rank holds it, and the way from one placement to another.

A buffer moves along several axes in one go, each collective working on contiguous memory::

    slice      R -> S0    local   ⎫ inner axes first: they make the large parts that outer ones
    reduce     P -> S0/R          ⎭ cut again, so these have less to carry
    gather     S0 -> R            outer axes first
    relabel    R -> P             an average of equal values is the value
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch

from shoal.errors import ConfigError
from shoal.fsdp.communicator import Pending
from shoal.fsdp.grid import Grid
from shoal.fsdp.layout import GlobalLayout, Rows
from shoal.fsdp.placement import Partial, Placement, Replicate, Shard, check_suffix
from shoal.fsdp.reduction import Reduction


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatBuffer:
    """The run of a group's global buffer that this rank holds under ``placements``."""

    layout: GlobalLayout
    grid: Grid
    placements: tuple[Placement, ...]

    data: torch.Tensor
    """The run, ``[stop - start]``. Padding and gaps hold nothing of meaning."""

    start: int = field(init=False)
    """Where the run starts in the global buffer, in elements."""

    stop: int = field(init=False)
    """One past its last element."""

    def __post_init__(self) -> None:
        check_suffix("placements", self.placements)
        start, stop = run_of(self.layout, self.grid, self.placements)
        if self.data.shape != (stop - start,):
            raise ValueError(f"the run has {stop - start} elements, the data {self.data.shape}")
        object.__setattr__(self, "start", start)
        object.__setattr__(self, "stop", stop)

    @classmethod
    def allocate(
        cls,
        layout: GlobalLayout,
        grid: Grid,
        placements: tuple[Placement, ...],
        dtype: torch.dtype,
        memory: Callable[[int, torch.dtype], torch.Tensor],
    ) -> Self:
        """A buffer of undefined contents, from ``allocate`` or ``lend`` of a ``Memory``."""
        start, stop = run_of(layout, grid, placements)
        data = memory(stop - start, dtype)
        return cls(layout=layout, grid=grid, placements=placements, data=data)

    @property
    def nbytes(self) -> int:
        """Memory of the run."""
        return self.data.numel() * self.data.element_size()

    def rows(self, index: int) -> Rows:
        """Which rows of a tensor are here."""
        return self.layout.rows(index, self.start, self.stop)

    def view(self, index: int) -> torch.Tensor:
        """The rows of a tensor that are here, ``[rows, *shape[1:]]``; shares storage."""
        rows = self.rows(index)
        num_rows = rows.stop - rows.start
        numel = num_rows * self.layout.row_numel(index)
        flat = self.data.narrow(0, rows.offset, numel)
        return flat.view(num_rows, *self.layout.shapes[index][1:])

    def part(self, start: int, stop: int) -> torch.Tensor:
        """Elements ``start`` to ``stop`` of the global buffer, which must be here."""
        return self.data.narrow(0, start - self.start, stop - start)

    def redistribute(
        self, placements: Sequence[Placement], *, out: torch.Tensor | None = None
    ) -> FlatBuffer:
        """The same values under other placements, any number of axes apart.

        Args:
            placements: Where to; sums are taken in fp32 at least.
            out: Memory of the right size, dtype and device for the result. Without it a result that
                is a part of this buffer shares its memory, and any other gets new memory.

        Raises:
            ConfigError: for a transition that has no meaning, such as sharded to partial sums.
        """
        target = tuple(placements)
        start, stop = run_of(self.layout, self.grid, target)
        if out is None:
            local = _Moves(self, target).is_local
            out = self.part(start, stop) if local else self.data.new_empty(stop - start)
        elif out.dtype != self.data.dtype or out.device != self.data.device:
            raise ValueError(f"out is {out.dtype} on {out.device}, not as the buffer")
        result = FlatBuffer(layout=self.layout, grid=self.grid, placements=target, data=out)
        in_fp32 = Reduction(accumulate_dtype=torch.promote_types(self.data.dtype, torch.float32))
        for pending in move(self, result, in_fp32):
            pending.wait()
        return result


def run_of(layout: GlobalLayout, grid: Grid, placements: Sequence[Placement]) -> tuple[int, int]:
    """The run of the global buffer that this rank holds under ``placements``."""
    sharded = [isinstance(placement, Shard) for placement in placements]
    return layout.run(sharded, grid.sizes, grid.ranks)


def move(
    source: FlatBuffer, target: FlatBuffer, reduction: Reduction | None = None
) -> Iterator[Pending]:
    """Bring the values of ``source`` into ``target``; yields each collective once it is issued.

    The caller waits for what was yielded before it goes on, and the values are in place at the
    end. A gather writes to the target as a whole and by its last collective only, since ranks of
    one host may share that memory and still read from it.

    Args:
        reduction: How the values become those of ``target``: partial sums are taken, and the values
            divided once, as it says; it adds to ``target`` only without a gather. By default sums
            are taken in the dtype of ``source``, and nothing is divided or added.
    """
    reduction = reduction or Reduction(accumulate_dtype=source.data.dtype)
    moves = _Moves(source, target.placements)
    grid, kinds, data = source.grid, source.placements, source.data
    del source  # its memory is free as soon as the first collective is over
    divisor = reduction.divisor
    for axis in moves.inwards:
        before, start = kinds[axis], moves.run[0]
        moves.sharded[axis] = isinstance(target.placements[axis], Shard)
        if not isinstance(before, Partial):
            data = data.narrow(0, moves.run[0] - start, moves.numel)
            continue
        to_target = axis == moves.inwards[-1] and not moves.gathers
        output = (
            target.data
            if to_target
            else data.new_empty(moves.numel, dtype=reduction.accumulate_dtype)
        )
        communicator = grid.communicators[axis]
        reduce = communicator.reduce_scatter if moves.sharded[axis] else communicator.all_reduce
        yield reduce(
            output,
            data,
            replace(
                reduction,
                divisor=divisor * (communicator.size if before.op == "avg" else 1),
                add=reduction.add and to_target,
            ),
        )
        data, divisor = output, 1.0
    for position, axis in enumerate(moves.gathers):
        if data.dtype != target.data.dtype:
            data = data.to(target.data.dtype)
        moves.sharded[axis] = False
        to_target = position == len(moves.gathers) - 1
        output = target.data if to_target else data.new_empty(moves.numel)
        yield grid.communicators[axis].all_gather(output, data)
        data = output
    if data is not target.data or divisor != 1.0:
        _write(target.data, data, replace(reduction, divisor=divisor))


class _Moves:
    """Which axes need which deed, in the order of the deeds."""

    def __init__(self, source: FlatBuffer, target: Sequence[Placement]) -> None:
        self._layout, self._grid = source.layout, source.grid
        self.sharded = [isinstance(placement, Shard) for placement in source.placements]
        self.inwards: list[int] = []
        self.gathers: list[int] = []
        self.is_local = True
        for axis in reversed(self._grid.active):
            self._sort(axis, source.placements[axis], target[axis])
        self.gathers.reverse()

    def _sort(self, axis: int, before: Placement, after: Placement) -> None:
        if before == after:
            return
        if isinstance(before, Partial) and not isinstance(after, Partial):
            self.inwards.append(axis)
            self.is_local = False
        elif isinstance(before, Replicate) and isinstance(after, Shard):
            self.inwards.append(axis)
        elif isinstance(before, Shard) and after in (Replicate(), Partial("avg")):
            self.gathers.append(axis)
            self.is_local = False
        elif not (isinstance(before, Replicate) and after == Partial("avg")):
            raise ConfigError(
                "placements",
                (before, after),
                "no values can go from the first to the second",
                "Sum or gather them first",
            )

    @property
    def run(self) -> tuple[int, int]:
        """What the data spans at this point of the way."""
        return self._layout.run(self.sharded, self._grid.sizes, self._grid.ranks)

    @property
    def numel(self) -> int:
        """Elements of the run."""
        start, stop = self.run
        return stop - start


def _write(target: torch.Tensor, data: torch.Tensor, reduction: Reduction) -> None:
    if reduction.divisor != 1.0:
        data = data.to(reduction.accumulate_dtype) / reduction.divisor
    if reduction.add:
        target.add_(data)
    elif target.data_ptr() != data.data_ptr():
        target.copy_(data)
