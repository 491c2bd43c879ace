"""Attention over the paged cache, one arithmetic for prefill and decode.

The keys of a sequence are taken in fixed blocks of 64 positions, 0-63, 64-127 and so on, whatever
the size of the cache's blocks. A query goes through the blocks in order and carries, in fp32, the
largest score so far, the sum of the weights and the weighted sum of the values:

    block 0: scores -> largest m, weights 2**(score - m), sum, values
    block 1: scores -> larger m', what was carried times 2**(m - m'), the new added …

(the running softmax of Milakov and Gimelshein, https://arxiv.org/abs/1805.02867). A query sees only
the blocks, and within them only the keys, that its own position and window allow. So its bits
depend on the queries beside it in nothing: a prompt may be cut into any chunks, and a decode step
does what prefill did.

A task is a key head and a run of queries of one sequence, whose rows share what is read of the
cache. Scores take the bf16 query and key with fp32 sums; weights are rounded to bf16 before they
meet the values, and their sum is that of the rounded weights.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from shoal.ops.fixed import tiles
from shoal.ops.fixed.kernel import Kernel, bits, kernel
from shoal.ops.fixed.kv_cache import KVCache
from shoal.ops.fixed.lanes import (
    broadcast,
    copy_bytes,
    device,
    float_of,
    keep,
    larger,
    largest,
    load,
    load_floats,
    power_of_two,
    read_float,
    read_int32,
    stack,
    store,
    store_floats,
    total,
    write_float,
    write_int,
    write_int32,
)

BLOCK = 64
"""Positions that a query takes between two rescalings."""

_MOST_QUERIES = 32
"""Queries of a task: rows times the query heads of a key head, unless one row has more."""

_LOG2_E = 1.4426950408889634


def paged_attention(
    query: torch.Tensor,
    cache: KVCache,
    layer: int,
    block_table: torch.Tensor,
    row_sequence: torch.Tensor,
    row_position: torch.Tensor,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Attention of each row to the keys of its sequence up to its own position.

    ``query`` is ``[T, heads, D]`` in the cache's dtype, heads a multiple of the cache's;
    ``block_table`` ``[S, most blocks]`` int32 the cache's blocks of each sequence in order,
    ``row_sequence`` and ``row_position`` ``[T]`` int32 say where each row stands; the keys and
    values up to it must be written. ``window`` limits a row to that many newest positions, itself
    included; blocks wholly before it are not looked at. Returns ``[T, heads, D]``, contiguous.
    """
    count, heads, width = query.shape
    if width != cache.head_dim or heads % cache.kv_heads or query.dtype != cache.dtype:
        raise ValueError(f"the cache does not fit queries {query.dtype} {tuple(query.shape)}")
    if query.stride(2) != 1:
        query = query.contiguous()
    tables = [x.contiguous() for x in (block_table, row_sequence, row_position)]
    out = torch.empty(count, heads, width, dtype=query.dtype)
    per_head = heads // cache.kv_heads
    run_rows = max(1, _MOST_QUERIES // per_head)
    size = query.element_size()
    queries = run_rows * per_head
    thread_bytes = 64 * -(-queries * _query_bytes(cache, size) // 64)
    scratch = torch.empty(torch.get_num_threads() * thread_bytes, dtype=torch.uint8)
    _KERNELS[query.dtype](
        count * cache.kv_heads,
        *(query.data_ptr(), query.stride(0) * size, query.stride(1) * size, count),
        *(cache.kv_heads, per_head, width, cache.keys[layer].data_ptr()),
        *(cache.values[layer].data_ptr(), cache.block_size, tables[0].data_ptr()),
        *(tables[0].shape[1], tables[1].data_ptr(), tables[2].data_ptr(), bits(scale * _LOG2_E)),
        *(0 if window is None else window, run_rows, scratch.data_ptr(), thread_bytes),
        out.data_ptr(),
    )
    return out


def _query_bytes(cache: KVCache, size: int) -> int:
    """Scratch of one query: copy, scores, weights, sums, addresses and what it carries."""
    return cache.key_steps * 4 + BLOCK * 4 + BLOCK * size + cache.padded_dim * 4 + 4 * 8 + 2 * 4


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
def _weigh(
    scores: Any,
    first: Any,
    stop: Any,
    scale: Any,
    weights: Any,
    size: Any,
    carried: Any,
    sums: Any,
    width: Any,
) -> None:
    """Turn a query's 64 ``scores`` into ``weights``, and rescale what it carries if need be.

    ``carried`` holds the largest score and the sum of weights, ``sums`` the weighted values.
    """
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
        for start in range(0, width, 16):
            store_floats(sums + start * 4, load_floats(sums + start * 4) * shrink)
    peak = broadcast(read_float(carried))
    added = broadcast(0.0)
    for vector in range(0, 64, 16):
        place = weights + vector * size
        store(place, power_of_two(load_floats(scores + vector * 4) - peak), 16, size)
        added = added + load(place, 16, size)
    write_float(carried + 4, read_float(carried + 4) + total(added))


def _attention(
    keys_product: Any, values_by_4: Any, values_by_1: Any, size: int, name: str
) -> Kernel:
    """The kernel for one dtype; a task is a row and a key head, idle unless a run begins there."""

    @device
    def add_values(
        weights: Any, count: Any, groups: Any, first: Any, stop: Any, padded: Any, sums: Any
    ) -> None:
        """Add the values of positions ``first`` to ``stop`` of a block to ``count`` queries."""
        start = 0
        while start + 64 <= padded:
            values_by_4(
                weights,
                count,
                groups,
                start * 4,
                first,
                stop,
                padded * 4,
                sums + start * 4,
                padded * 4,
            )
            start += 64
        while start < padded:
            values_by_1(
                weights,
                count,
                groups,
                start * 4,
                first,
                stop,
                padded * 4,
                sums + start * 4,
                padded * 4,
            )
            start += 16

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
        per_step = 4 // size
        query_bytes = (width + per_step - 1) // per_step * 4
        padded = (width + 15) // 16 * 16
        key_group, value_group = query_bytes * 16, 16 * padded * size
        copies = a[17] + thread * a[18]
        scores = copies + queries * query_bytes
        weights = scores + queries * 256
        sums = weights + queries * 64 * size
        copy_table = sums + queries * padded * 4
        weight_table = copy_table + queries * 8
        carried = weight_table + queries * 8
        for index in range(queries):
            copy = copies + index * query_bytes
            write_int32(copy + query_bytes - 4, 0)
            place = query + (row + index // per_head) * row_stride
            place += (head * per_head + index % per_head) * head_stride
            copy_bytes(copy, place, width * size)
            write_int(copy_table + index * 8, copy)
            write_int(weight_table + index * 8, weights + index * 64 * size)
            write_float(carried + index * 8, -math.inf)
            write_float(carried + index * 8 + 4, 0.0)
            for start in range(0, padded, 16):
                store_floats(sums + (index * padded + start) * 4, broadcast(0.0))
        position = read_int32(positions + row * 4)
        last = position + end - row - 1
        oldest = _first_seen(position, window)
        line = table + read_int32(sequences + row * 4) * table_width * 4
        key_groups, value_groups = _key_groups(), _value_groups()
        for base in range(oldest // 64 * 64, last + 1, 64):
            for group in range(4):
                here = min(max(base + group * 16, oldest), last)
                block = read_int32(line + here // block_size * 4)
                number = (block * heads + head) * (block_size // 16) + here % block_size // 16
                write_int(key_groups + group * 8, keys + number * key_group)
                write_int(value_groups + group * 8, values + number * value_group)
            for index in range(queries):
                for vector in range(4):
                    store_floats(scores + index * 256 + vector * 64, broadcast(0.0))
            keys_product(copy_table, queries, key_groups, query_bytes // 4, scores)
            whole = base >= _first_seen(last, window) and base + 63 <= position
            for index in range(queries):
                at = position + index // per_head
                first = max(_first_seen(at, window) - base, 0)
                stop = min(at - base + 1, 64)
                if first < stop:
                    _weigh(
                        scores + index * 256,
                        first,
                        stop,
                        scale,
                        weights + index * 64 * size,
                        size,
                        carried + index * 8,
                        sums + index * padded * 4,
                        padded,
                    )
            if whole:
                add_values(weight_table, queries, value_groups, 0, 64, padded, sums)
            else:
                for index in range(0, queries, per_head):
                    at = position + index // per_head
                    first = max(_first_seen(at, window) - base, 0)
                    stop = min(at - base + 1, 64)
                    if first < stop:
                        add_values(
                            weight_table + index * 8,
                            per_head,
                            value_groups,
                            first,
                            stop,
                            padded,
                            sums + index * padded * 4,
                        )
        for index in range(queries):
            place = (
                a[19]
                + (
                    (row + index // per_head) * heads * per_head
                    + head * per_head
                    + index % per_head
                )
                * width
                * size
            )
            divisor = broadcast(read_float(carried + index * 8 + 4))
            for start in range(0, width, 16):
                value = load_floats(sums + (index * padded + start) * 4) / divisor
                store(place + start * size, value, min(width - start, 16), size)

    return body


def _attention_of(dtype: torch.dtype) -> Kernel:
    pairs = dtype == torch.bfloat16
    return _attention(
        tiles.column_product(4, pairs=pairs, apart=True),
        tiles.step_product(4, pairs=pairs),
        tiles.step_product(1, pairs=pairs),
        dtype.itemsize,
        f"attention_{'bf16' if pairs else 'fp32'}",
    )


_KERNELS = {dtype: _attention_of(dtype) for dtype in (torch.bfloat16, torch.float32)}
