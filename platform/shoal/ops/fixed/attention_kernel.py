"""The kernel of paged attention; ``shoal.ops.fixed.attention`` says what it computes.

A task is a row and a key head. It is idle unless a run begins at the row: consecutive rows of one
sequence, cut where the position is a multiple of the run's length. Its queries, ``index`` 0 to
``queries - 1``, are the rows of the run times the query heads of the key head, row by row. Each has
in the scratch memory of its thread

    copy      the query itself, rounded up to whole steps
    scores    of the 64 positions of a block, fp32
    weights   of the same, in the dtype of the cache
    sums      of weighted values, fp32
    carried   the largest score so far and the sum of weights, fp32

and the address of its copy and of its weights in two tables, which is where the tiles read rows.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from shoal.ops.fixed import tiles
from shoal.ops.fixed.arithmetic import broadcast, keep, larger, largest, power_of_two, total
from shoal.ops.fixed.kernel import Kernel, kernel
from shoal.ops.fixed.lanes import device
from shoal.ops.fixed.memory import (
    copy_bytes,
    float_of,
    load,
    load_floats,
    read_float,
    read_int32,
    stack,
    store,
    store_floats,
    write_float,
    write_int,
    write_int32,
)


def query_bytes(width: int, size: int) -> int:
    """Scratch that one query of ``width`` numbers of ``size`` bytes takes, a multiple of 64."""
    copy, padded = -(-width * size // 4) * 4, -(-width // 16) * 16
    each = copy + 64 * 4 + 64 * size + padded * 4 + 2 * 8 + 2 * 4
    return -(-each // 64) * 64


# Of a thread: addresses of the 4 groups of keys, and of values, of a block of 64 positions.
_key_groups = stack(1)
_value_groups = stack(1)


@device
def _begins_run(row: Any, sequences: Any, positions: Any, run_rows: Any) -> Any:
    """Whether a row does not follow the one before it in the same run."""
    if row == 0:
        return True
    position = read_int32(positions + row * 4)
    return (
        position % run_rows == 0
        or read_int32(sequences + row * 4) != read_int32(sequences + row * 4 - 4)
        or position != read_int32(positions + row * 4 - 4) + 1
    )


@device
def _first_seen(position: Any, window: Any) -> Any:
    """The oldest position that one at ``position`` sees."""
    return max(position - window + 1, 0) if window else 0


@device
def _seen(position: Any, window: Any, base: Any) -> Any:
    """The first number of the block at ``base`` that ``position`` sees, and one past the last."""
    return max(_first_seen(position, window) - base, 0), min(position - base + 1, 64)


@device
def _begin(
    queries: Any,
    query: Any,
    row_stride: Any,
    head_stride: Any,
    per_head: Any,
    copies: Any,
    copy: Any,
    width: Any,
    size: Any,
) -> None:
    """Copy the queries of a run, what is past their width being zero."""
    for index in range(queries):
        target = copies + index * copy
        source = query + index // per_head * row_stride + index % per_head * head_stride
        write_int32(target + copy - 4, 0)
        copy_bytes(target, source, width * size)


@device
def _clear(
    queries: Any,
    copies: Any,
    copy: Any,
    copy_table: Any,
    weights: Any,
    size: Any,
    weight_table: Any,
    carried: Any,
    sums: Any,
    padded: Any,
) -> None:
    """Fill the tables, and set out with nothing seen."""
    for index in range(queries):
        write_int(copy_table + index * 8, copies + index * copy)
        write_int(weight_table + index * 8, weights + index * 64 * size)
        write_float(carried + index * 8, -math.inf)
        write_float(carried + index * 8 + 4, 0.0)
    for place in range(0, queries * padded * 4, 64):
        store_floats(sums + place, broadcast(0.0))


@device
def _locate(
    base: Any,
    oldest: Any,
    last: Any,
    blocks: Any,
    block_size: Any,
    heads: Any,
    head: Any,
    groups: Any,
    start: Any,
    group_bytes: Any,
) -> None:
    """Write the addresses of a block's 4 groups; instead of one that no query sees, another."""
    for group in range(4):
        here = min(max(base + group * 16, oldest), last)
        block = read_int32(blocks + here // block_size * 4)
        number = (block * heads + head) * (block_size // 16) + here % block_size // 16
        write_int(groups + group * 8, start + number * group_bytes)


@device
def _weigh(
    scores: Any,
    first: Any,
    stop: Any,
    scale: Any,
    weights: Any,
    size: Any,
    carried: Any,
    sums: Any,
    padded: Any,
) -> None:
    """Turn a query's 64 ``scores`` into ``weights``, and rescale what it carries if need be."""
    peak = broadcast(-math.inf)
    for vector in range(0, 64, 16):
        score = load_floats(scores + vector * 4) * broadcast(scale)
        score = keep(score, first - vector, stop - vector, -math.inf)
        store_floats(scores + vector * 4, score)
        peak = larger(score, peak)
    most, highest = read_float(carried), largest(peak)
    if highest > most:
        shrink = power_of_two(broadcast(most - highest))
        write_float(carried, highest)
        write_float(carried + 4, read_float(carried + 4) * largest(shrink))
        for place in range(0, padded * 4, 64):
            store_floats(sums + place, load_floats(sums + place) * shrink)
    peak = broadcast(read_float(carried))
    added = broadcast(0.0)
    for vector in range(0, 64, 16):
        place = weights + vector * size
        store(place, power_of_two(load_floats(scores + vector * 4) - peak), 16, size)
        added = added + load(place, 16, size)
    write_float(carried + 4, read_float(carried + 4) + total(added))


@device
def _finish(
    queries: Any,
    per_head: Any,
    sums: Any,
    carried: Any,
    padded: Any,
    width: Any,
    size: Any,
    out: Any,
    row_bytes: Any,
) -> None:
    """Divide by the sums of weights and store."""
    for index in range(queries):
        place = out + index // per_head * row_bytes + index % per_head * width * size
        divisor = broadcast(read_float(carried + index * 8 + 4))
        for start in range(0, width, 16):
            value = load_floats(sums + (index * padded + start) * 4) / divisor
            store(place + start * size, value, min(width - start, 16), size)


def _add_values(by_4: Any, by_1: Any) -> Any:
    """A kernel function: add the values that queries see of a block to their sums."""

    @device
    def add(
        weights: Any, count: Any, groups: Any, first: Any, stop: Any, padded: Any, sums: Any
    ) -> None:
        start, end = 0, padded * 4
        while start + 256 <= end:
            by_4(weights, count, groups, start, first, stop, sums + start, end)
            start += 256
        while start < end:
            by_1(weights, count, groups, start, first, stop, sums + start, end)
            start += 64

    return add


def _attend_to_block(keys_product: Any, add_values: Any, size: int) -> Any:
    """A kernel function: take queries of a run through one block of keys and values."""

    @device
    def attend(
        queries: Any,
        per_head: Any,
        position: Any,
        base: Any,
        window: Any,
        key_groups: Any,
        value_groups: Any,
        copy: Any,
        copy_table: Any,
        scale: Any,
        scores: Any,
        weights: Any,
        weight_table: Any,
        carried: Any,
        sums: Any,
        padded: Any,
    ) -> None:
        """The first of the queries is at ``position``."""
        for place in range(0, queries * 256, 64):
            store_floats(scores + place, broadcast(0.0))
        keys_product(copy_table, queries, key_groups, copy // 4, scores)
        whole = True
        for index in range(queries):
            first, stop = _seen(position + index // per_head, window, base)
            whole = whole and first == 0 and stop == 64
            if first < stop:
                _weigh(
                    *(scores + index * 256, first, stop, scale, weights + index * 64 * size, size),
                    *(carried + index * 8, sums + index * padded * 4, padded),
                )
        if whole:
            add_values(weight_table, queries, value_groups, 0, 64, padded, sums)
            return
        for index in range(0, queries, per_head):
            first, stop = _seen(position + index // per_head, window, base)
            if first < stop:
                rows, place = weight_table + index * 8, sums + index * padded * 4
                add_values(rows, per_head, value_groups, first, stop, padded, place)

    return attend


def _attention(attend: Any, size: int, name: str) -> Kernel:
    """The kernel of a dtype; the head of this file says what a task is."""

    @kernel(20, name)
    def body(task: Any, thread: Any, a: Any) -> None:
        query, row_stride, head_stride, count, heads, per_head, width, keys, values = (
            *(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8]),
        )
        block_size, table, table_width, sequences, positions, scale, window, run_rows = (
            *(a[9], a[10], a[11], a[12], a[13], float_of(a[14]), a[15], a[16]),
        )
        row, head = task // heads, task % heads
        if not _begins_run(row, sequences, positions, run_rows):
            return
        end = row + 1
        while end < count and not _begins_run(end, sequences, positions, run_rows):
            end += 1
        queries = (end - row) * per_head
        copy, padded = (width * size + 3) // 4 * 4, (width + 15) // 16 * 16
        copies = a[17] + thread * a[18]
        scores = copies + queries * copy
        weights = scores + queries * 256
        sums = weights + queries * 64 * size
        copy_table = sums + queries * padded * 4
        weight_table = copy_table + queries * 8
        carried = weight_table + queries * 8
        start = query + row * row_stride + head * per_head * head_stride
        _begin(queries, start, row_stride, head_stride, per_head, copies, copy, width, size)
        _clear(
            *(queries, copies, copy, copy_table, weights, size, weight_table, carried),
            *(sums, padded),
        )
        position = read_int32(positions + row * 4)
        last, oldest = position + end - row - 1, _first_seen(position, window)
        blocks = table + read_int32(sequences + row * 4) * table_width * 4
        key_groups, value_groups = _key_groups(), _value_groups()
        for base in range(oldest // 64 * 64, last + 1, 64):
            where = (base, oldest, last, blocks, block_size, heads, head)
            _locate(*where, key_groups, keys, copy * 16)
            _locate(*where, value_groups, values, padded * 16 * size)
            attend(
                *(queries, per_head, position, base, window, key_groups, value_groups),
                *(copy, copy_table, scale, scores, weights, weight_table, carried, sums, padded),
            )
        row_bytes = heads * per_head * width * size
        out = a[19] + row * row_bytes + head * per_head * width * size
        _finish(queries, per_head, sums, carried, padded, width, size, out, row_bytes)

    return body


def _attention_of(dtype: torch.dtype) -> Kernel:
    pairs = dtype == torch.bfloat16
    add_values = _add_values(tiles.step_product(4, pairs=pairs), tiles.step_product(1, pairs=pairs))
    keys_product = tiles.column_product(4, pairs=pairs, apart=True)
    name = f"attention_{'bf16' if pairs else 'fp32'}"
    size = dtype.itemsize
    return _attention(_attend_to_block(keys_product, add_values, size), size, name)


KERNELS = {dtype: _attention_of(dtype) for dtype in (torch.bfloat16, torch.float32)}
"""By the dtype of the cache."""
