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

import torch

from shoal.ops.fixed.attention_kernel import KERNELS, query_bytes
from shoal.ops.fixed.kernel import bits
from shoal.ops.fixed.kv_cache import KVCache

_MOST_QUERIES = 32
"""Queries of a task: rows times the query heads of a key head, unless one row has more."""


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
    thread_bytes = run_rows * per_head * query_bytes(width, size)
    scratch = torch.empty(torch.get_num_threads() * thread_bytes, dtype=torch.uint8)
    KERNELS[query.dtype](
        count * cache.kv_heads,
        *(query.data_ptr(), query.stride(0) * size, query.stride(1) * size, count),
        *(cache.kv_heads, per_head, width, cache.keys[layer].data_ptr()),
        *(cache.values[layer].data_ptr(), cache.block_size, tables[0].data_ptr()),
        *(tables[0].shape[1], tables[1].data_ptr(), tables[2].data_ptr()),
        *(bits(scale * math.log2(math.e)), 0 if window is None else window, run_rows),
        *(scratch.data_ptr(), thread_bytes, out.data_ptr()),
    )
    return out
