"""The product at the heart of every kernel here: a few rows times 64 columns, steps in order.

    out[row, column] += sum over steps of  row[step] * weight[step, column]

Each (row, column) has an accumulator of its own, a lane of a register, and steps are taken one
after the other from the first to the last. So the bits of an output depend on its row and its
column alone, however many rows and columns are computed beside it, and it does not matter if an
accumulator rests in memory between two steps.

A step is one fp32 number, or two bf16 numbers that lie side by side: both take 4 bytes, of a row
and of each column. Two bf16 products are added to the fp32 accumulator by one ``vdpbf16ps`` where
the CPU has it, else by two fused multiply-adds; these differ in rounding, so machines with and
without it are told apart by the fingerprint.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.registry import cpu_target

from shoal.ops.fixed.lanes import (
    BYTES,
    FLOATS,
    I32,
    I64,
    WIDTH,
    WORDS,
    call,
    device,
    operation,
    pointer,
    splat,
    words,
)


def _compiled_for(feature: str) -> bool:
    """Whether numba compiles for a CPU with ``feature``, by its name in LLVM."""
    _, _, features = cpu_target.target_context.codegen().magic_tuple()
    return f"+{feature}" in features.split(",")


HAS_BF16_PRODUCTS = _compiled_for("avx512bf16")
"""Whether the CPU multiplies bf16 numbers itself."""

MOST_ROWS = 6
"""Rows of the largest tile: 6 rows of 4 registers leave 8 of 32 for the operands."""

WHOLE_ROWS = 36
"""From so many rows on, a panel is taken whole by one tile after the other."""

_TOGETHER = 32
"""Steps that all tiles of fewer rows take before the next: 8 KiB of columns in the nearest cache,
which are asked of memory while those before them are multiplied."""


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bf16, which llvmlite does not have."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_BFLOATS = ir.VectorType(_BFloat(), 2 * WIDTH)


def _add_single(b: ir.IRBuilder, total: ir.Value, row: ir.Value, column: ir.Value) -> ir.Value:
    row, column = b.bitcast(row, FLOATS), b.bitcast(column, FLOATS)
    return call(b, "llvm.fma.v16f32", FLOATS, row, column, total)


def _add_pair(b: ir.IRBuilder, total: ir.Value, row: ir.Value, column: ir.Value) -> ir.Value:
    if HAS_BF16_PRODUCTS:
        signature = ir.FunctionType(FLOATS, [FLOATS, _BFLOATS, _BFLOATS])
        product = cgutils.get_or_insert_function(
            b.module, signature, "llvm.x86.avx512bf16.dpbf16ps.512"
        )
        return b.call(product, [total, b.bitcast(row, _BFLOATS), b.bitcast(column, _BFLOATS)])
    for widen in (_first_of_pair, _second_of_pair):
        total = call(b, "llvm.fma.v16f32", FLOATS, widen(b, row), widen(b, column), total)
    return total


_FIRST, _SECOND = 0xFFFF, -65536
"""Masks of the halves of a word that holds a pair."""


def _first_of_pair(b: ir.IRBuilder, pairs: ir.Value) -> ir.Value:
    return b.bitcast(b.shl(pairs, words(16)), FLOATS)


def _second_of_pair(b: ir.IRBuilder, pairs: ir.Value) -> ir.Value:
    return b.bitcast(b.and_(pairs, words(_SECOND)), FLOATS)


class _Tile:
    """Accumulators of ``rows`` rows and ``columns`` vectors, in registers while steps are taken."""

    def __init__(self, b: ir.IRBuilder, rows: int, columns: int, pairs: bool) -> None:
        self.b, self.rows, self.columns = b, rows, columns
        self.add = _add_pair if pairs else _add_single
        self.sums = [[cgutils.alloca_once(b, FLOATS) for _ in range(columns)] for _ in range(rows)]

    def _places(self, out: ir.Value, row_bytes: ir.Value) -> Any:
        for row in range(self.rows):
            start = self.b.add(out, self.b.mul(row_bytes, I64(row)))
            for column in range(self.columns):
                place = self.b.add(start, I64(BYTES * column))
                yield self.sums[row][column], pointer(self.b, place, FLOATS)

    def load(self, out: ir.Value, row_bytes: ir.Value) -> None:
        for total, place in self._places(out, row_bytes):
            self.b.store(self.b.load(place, align=4), total)

    def store(self, out: ir.Value, row_bytes: ir.Value) -> None:
        for total, place in self._places(out, row_bytes):
            self.b.store(self.b.load(total), place, align=4)

    def step(self, rows: list[ir.Value], columns: list[ir.Value], mask: int | None = None) -> None:
        """Add products of the numbers or pairs at these addresses, ``mask`` of each column's."""
        b = self.b
        vectors = [b.load(pointer(b, column, WORDS), align=4) for column in columns]
        if mask is not None:
            vectors = [b.and_(vector, words(mask)) for vector in vectors]
        for sums, row in zip(self.sums, rows, strict=True):
            number = splat(b, b.load(pointer(b, row, I32), align=4), WORDS)
            for total, vector in zip(sums, vectors, strict=True):
                b.store(self.add(b, b.load(total), number, vector), total)


def _table(b: ir.IRBuilder, addresses: ir.Value, count: int) -> list[ir.Value]:
    """The ``count`` addresses in memory at ``addresses``."""
    return [
        b.load(pointer(b, b.add(addresses, I64(8 * index)), I64), align=8) for index in range(count)
    ]


def _fetch(b: ir.IRBuilder, where: ir.Value) -> None:
    """Ask for the memory at ``where``, which may be nobody's, before it is needed."""
    byte = ir.IntType(8).as_pointer()
    signature = ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32])
    fetch = cgutils.get_or_insert_function(b.module, signature, "llvm.prefetch.p0i8")
    read, nearest, data = I32(0), I32(3), I32(1)
    b.call(fetch, [b.inttoptr(where, byte), read, nearest, data])


def _by_columns(rows: int, columns: int, pairs: bool, apart: bool) -> Any:
    """A tile whose vectors of columns lie side by side, or each in a place of its own.

    Arguments: addresses of the rows (a table of int64); address of the first vector or, where they
    lie ``apart``, of a table of their addresses; first step, and one past the last; address of the
    fp32 sums, which lie row by row. From step to step a vector's next numbers follow those of its
    neighbours.
    """
    step_bytes, row_bytes = BYTES * (1 if apart else columns), I64(BYTES * columns)

    @operation(types.void, *[types.int64] * 5)
    def multiply(
        b: ir.IRBuilder,
        row_table: ir.Value,
        vectors: ir.Value,
        first: ir.Value,
        stop: ir.Value,
        out: ir.Value,
    ) -> None:
        tile = _Tile(b, rows, columns, pairs)
        tile.load(out, row_bytes)
        row_starts = _table(b, row_table, rows)
        starts = _table(b, vectors, columns if apart else 0)
        with cgutils.for_range_slice(b, first, stop, I64(1), I64) as (index, _):
            along_row = b.mul(index, I64(4))
            along_column = b.mul(index, I64(step_bytes))
            if apart:
                places = [b.add(start, along_column) for start in starts]
            else:
                place = b.add(vectors, along_column)
                places = [b.add(place, I64(BYTES * number)) for number in range(columns)]
                for number in range(columns):
                    _fetch(b, b.add(place, I64(step_bytes * _TOGETHER + BYTES * number)))
            tile.step([b.add(start, along_row) for start in row_starts], places)
        tile.store(out, row_bytes)

    return multiply


def _by_steps(rows: int, columns: int, pairs: bool) -> Any:
    """A tile over steps that lie in groups of 16 numbers, the groups anywhere.

    Arguments: addresses of the rows, addresses of the groups (both tables of int64), what to add
    to the latter, first number, number after the last, address of the fp32 sums, and bytes from
    row to row of the sums, which are also those from step to step. Where a pair is begun or ended
    by the bounds, the other half of its columns is taken as zero whatever it holds.
    """
    per_group = WIDTH // 2 if pairs else WIDTH

    @operation(types.void, *[types.int64] * 7)
    def multiply(
        b: ir.IRBuilder,
        row_table: ir.Value,
        group_table: ir.Value,
        offset: ir.Value,
        first: ir.Value,
        stop: ir.Value,
        out: ir.Value,
        row_bytes: ir.Value,
    ) -> None:
        tile = _Tile(b, rows, columns, pairs)
        tile.load(out, row_bytes)
        row_starts = _table(b, row_table, rows)

        def step(number: ir.Value, mask: int | None = None) -> None:
            group = b.mul(b.udiv(number, I64(per_group)), I64(8))
            start = b.load(pointer(b, b.add(group_table, group), I64), align=8)
            inside = b.mul(b.urem(number, I64(per_group)), row_bytes)
            column = b.add(b.add(start, inside), offset)
            along_row = b.mul(number, I64(4))
            tile.step(
                [b.add(start, along_row) for start in row_starts],
                [b.add(column, I64(BYTES * index)) for index in range(columns)],
                mask,
            )

        if not pairs:
            with cgutils.for_range_slice(b, first, stop, I64(1), I64) as (index, _):
                step(index)
        else:
            half = b.lshr(first, I64(1))
            with b.if_then(b.trunc(first, ir.IntType(1))):
                step(half, _SECOND)
            begin, end = b.add(half, b.and_(first, I64(1))), b.lshr(stop, I64(1))
            with cgutils.for_range_slice(b, begin, end, I64(1), I64) as (index, _):
                step(index)
            with b.if_then(b.trunc(stop, ir.IntType(1))):
                step(end, _FIRST)
        tile.store(out, row_bytes)

    return multiply


def column_product(columns: int, *, pairs: bool, apart: bool) -> Any:
    """A kernel function: tiles by columns for any number of rows.

    Its arguments are addresses of the rows, their number, columns as the tile takes them, number of
    steps, and address of the sums.
    """
    one, two, three, four, five, six = (
        _by_columns(rows, columns, pairs, apart) for rows in range(1, MOST_ROWS + 1)
    )
    row_bytes = BYTES * columns

    @device
    def part(rows: Any, count: Any, vectors: Any, first: Any, stop: Any, out: Any) -> None:
        while count >= 6:
            six(rows, vectors, first, stop, out)
            rows, out, count = rows + 48, out + 6 * row_bytes, count - 6
        if count == 5:
            five(rows, vectors, first, stop, out)
        elif count == 4:
            four(rows, vectors, first, stop, out)
        elif count == 3:
            three(rows, vectors, first, stop, out)
        elif count == 2:
            two(rows, vectors, first, stop, out)
        elif count == 1:
            one(rows, vectors, first, stop, out)

    @device
    def multiply(rows: Any, count: Any, vectors: Any, steps: Any, out: Any) -> None:
        together = _TOGETHER if MOST_ROWS < count < WHOLE_ROWS else steps
        for first in range(0, steps, together):
            part(rows, count, vectors, first, min(first + together, steps), out)

    return multiply


def step_product(columns: int, *, pairs: bool) -> Any:
    """A kernel function: tiles by steps for any number of rows, otherwise like the above."""
    one, two, four, six = (_by_steps(rows, columns, pairs) for rows in (1, 2, 4, 6))

    @device
    def multiply(
        rows: Any,
        count: Any,
        groups: Any,
        offset: Any,
        first: Any,
        stop: Any,
        out: Any,
        row_bytes: Any,
    ) -> None:
        while count >= 6:
            six(rows, groups, offset, first, stop, out, row_bytes)
            rows, out, count = rows + 48, out + 6 * row_bytes, count - 6
        if count >= 4:
            four(rows, groups, offset, first, stop, out, row_bytes)
            rows, out, count = rows + 32, out + 4 * row_bytes, count - 4
        if count >= 2:
            two(rows, groups, offset, first, stop, out, row_bytes)
            rows, out, count = rows + 16, out + 2 * row_bytes, count - 2
        if count == 1:
            one(rows, groups, offset, first, stop, out, row_bytes)

    return multiply
