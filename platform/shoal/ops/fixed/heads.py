"""From the projections of a layer to what attention takes: norms, rotation, the cache, in one go.

    query ── norm of each head ── rotation ──► queries of paged_attention
    key   ── norm of each head ── rotation ──► cache
    value ───────────────────────────────────► cache

Every step rounds as ``rms_norm``, ``rotate`` and ``KVCache.write`` do one after the other, so the
bits are theirs; what is spared is their way through memory and their launches.
"""

from __future__ import annotations

from typing import Any

import torch

from shoal.ops.fixed.kernel import bits, kernel
from shoal.ops.fixed.kv_cache import KVCache, store_head
from shoal.ops.fixed.lanes import device
from shoal.ops.fixed.memory import float_of, read_int, stack
from shoal.ops.fixed.norm import normalize
from shoal.ops.fixed.rotary import rotate_head

_MOST_BYTES = 2048
"""Of one head: what a thread's two scratch heads hold."""

_scratch = stack(2 * _MOST_BYTES // 64)


def place_heads(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cosine: torch.Tensor,
    sine: torch.Tensor,
    cache: KVCache,
    layer: int,
    slots: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    epsilon: float = 0.0,
) -> torch.Tensor:
    """Store keys and values in the cache and give the queries, ``[T, heads, D]``.

    ``query`` is ``[T, heads * D]``, ``key`` and ``value`` are ``[T, key heads * D]`` in the cache's
    dtype, slices of one tensor say; ``cosine`` and ``sine`` ``[T, D/2]``, ``slots`` ``[T]`` int64.
    ``norms`` holds the weights ``[D]`` of the norms of each query head and each key head.
    """
    width, size = cache.head_dim, query.element_size()
    if key.shape[1] != cache.kv_heads * width or query.dtype != cache.dtype:
        raise ValueError(f"the cache does not hold {key.dtype} {tuple(key.shape)}")
    if width * size > _MOST_BYTES:
        raise ValueError(f"heads of {width} are larger than these kernels were made for")
    query, key, value = (x if x.stride(1) == 1 else x.contiguous() for x in (query, key, value))
    cosine, sine, slots = cosine.contiguous(), sine.contiguous(), slots.contiguous()
    count, heads = query.shape[0], query.shape[1] // width
    out = torch.empty(count, heads, width, dtype=query.dtype)
    weights = (0, 0, 4)
    if norms is not None:
        weights = norms[0].data_ptr(), norms[1].data_ptr(), norms[0].element_size()
    _place_heads(
        count,
        *(query.data_ptr(), query.stride(0) * size, heads, size),
        *(key.data_ptr(), key.stride(0) * size, value.data_ptr(), value.stride(0) * size),
        *(cosine.data_ptr(), sine.data_ptr(), cosine.element_size(), slots.data_ptr()),
        *(*weights, bits(epsilon), out.data_ptr(), cache.kv_heads, width, cache.block_size),
        *(cache.keys[layer].data_ptr(), cache.values[layer].data_ptr()),
    )
    return out


@device
def _placed(
    source: Any,
    width: Any,
    size: Any,
    weight: Any,
    weight_size: Any,
    epsilon: Any,
    cosine: Any,
    sine: Any,
    angle_size: Any,
    scratch: Any,
    out: Any,
) -> None:
    """Normalize one head, where there is a weight, and rotate it."""
    if weight:
        normalize(source, width, size, weight, weight_size, epsilon, scratch, size)
        source = scratch
    rotate_head(source, width // 2, size, cosine, sine, angle_size, out)


@kernel(22, "place_heads")
def _place_heads(task: Any, thread: Any, a: Any) -> None:
    query, query_stride, heads, size, key, key_stride, value, value_stride = (
        *(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7]),
    )
    angle_size, slot = a[10], read_int(a[11] + task * 8)
    query_weight, key_weight, weight_size, epsilon = a[12], a[13], a[14], float_of(a[15])
    out, kv_heads, width, block_size, keys, values = a[16], a[17], a[18], a[19], a[20], a[21]
    cosine = a[8] + task * (width // 2) * angle_size
    sine = a[9] + task * (width // 2) * angle_size
    scratch = _scratch()
    rotated = scratch + 2048
    for head in range(heads):
        _placed(
            query + task * query_stride + head * width * size,
            width,
            size,
            query_weight,
            weight_size,
            epsilon,
            cosine,
            sine,
            angle_size,
            scratch,
            out + (task * heads + head) * width * size,
        )
    if slot < 0:
        return
    for head in range(kv_heads):
        _placed(
            key + task * key_stride + head * width * size,
            width,
            size,
            key_weight,
            weight_size,
            epsilon,
            cosine,
            sine,
            angle_size,
            scratch,
            rotated,
        )
        place = value + task * value_stride + head * width * size
        store_head(rotated, place, width, size, slot, head, kv_heads, block_size, keys, values)
