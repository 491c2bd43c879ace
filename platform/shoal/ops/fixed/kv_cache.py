"""The keys and values of all sequences, in blocks, laid out for the attention tiles.

A block has room for ``block_size`` tokens, a multiple of 16, of one layer and key head. Within it,
16 tokens make a group, whose keys and values are stored so that a tile reads whole registers:

    keys     [D / 2 pairs][16 tokens][2]     lanes are tokens, steps go along the head
    values   [8 pairs of tokens][D][2]       lanes go along the head, steps are tokens

(for fp32 there are no pairs, and the steps are single numbers). D is rounded up to whole pairs for
keys and to whole registers for values; what is past it stays zero.
"""

from __future__ import annotations

from typing import Any

import torch

from shoal.errors import ConfigError
from shoal.ops.fixed import huge_pages
from shoal.ops.fixed.kernel import kernel
from shoal.ops.fixed.lanes import device
from shoal.ops.fixed.memory import (
    copy_bytes,
    read_half,
    read_int,
    read_int32,
    write_half,
    write_int32,
)

GROUP = 16
"""Tokens that lie together; ``block_size`` is a multiple of it."""

_TASK_ROWS = 8


class KVCache:
    """Memory for ``num_blocks`` blocks of ``block_size`` tokens in each layer."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
    ) -> None:
        if block_size <= 0 or block_size % GROUP:
            raise ConfigError(
                "serve.kv.block_tokens",
                block_size,
                f"a block holds whole groups of {GROUP} tokens",
                f"Take a multiple of {GROUP}",
            )
        if dtype not in (torch.bfloat16, torch.float32):
            raise ConfigError(
                "serve.kv.dtype", str(dtype), "keys and values are bf16 or fp32", "Take one of them"
            )
        self.num_blocks, self.block_size, self.kv_heads = num_blocks, block_size, kv_heads
        self.head_dim, self.dtype = head_dim, dtype
        per_step = 1 if dtype == torch.float32 else 2
        self.key_steps = -(-head_dim // per_step)
        self.padded_dim = head_dim + -head_dim % 16
        shape = (layers, num_blocks, kv_heads, block_size // GROUP)
        self.keys = huge_pages.zeros((*shape, self.key_steps, GROUP), torch.int32)
        self.values = huge_pages.zeros((*shape, GROUP // per_step, self.padded_dim), torch.int32)

    @staticmethod
    def block_bytes(
        block_size: int, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> int:
        """Memory that one block takes over all layers."""
        size = dtype.itemsize
        keys = -(-head_dim * size // 4) * 4
        values = (head_dim + -head_dim % 16) * size
        return layers * kv_heads * block_size * (keys + values)

    def write(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Store ``key`` and ``value`` ``[T, key heads, D]`` at ``slots`` ``[T]`` int64.

        Slot ``b * block_size + i`` is the i-th token of block b; a negative slot stores nothing.
        """
        count, size = key.shape[0], key.element_size()
        if key.shape[1:] != (self.kv_heads, self.head_dim) or key.dtype != self.dtype:
            raise ValueError(f"the cache does not hold {key.dtype} {tuple(key.shape)}")
        key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (key, value))
        slots = slots.contiguous()
        _write(
            -(-count // _TASK_ROWS),
            *(key.data_ptr(), key.stride(0) * size, key.stride(1) * size),
            *(value.data_ptr(), value.stride(0) * size, value.stride(1) * size),
            *(slots.data_ptr(), count, self.kv_heads, self.head_dim, size, self.block_size),
            *(self.keys[layer].data_ptr(), self.values[layer].data_ptr()),
        )


@device
def store_head(
    key: Any,
    value: Any,
    width: Any,
    size: Any,
    slot: Any,
    head: Any,
    heads: Any,
    block_size: Any,
    keys: Any,
    values: Any,
) -> None:
    """Store one key head's key and value, contiguous ones, at ``slot`` of a layer."""
    per_step = 4 // size
    key_group = (width + per_step - 1) // per_step * 64
    value_step = (width + 15) // 16 * 64
    value_group = 16 // per_step * value_step
    inside = slot % block_size
    lane = inside % 16
    group = (slot // block_size * heads + head) * (block_size // 16) + inside // 16
    target = keys + group * key_group + lane * 4
    for step in range(width // per_step):
        write_int32(target + step * 64, read_int32(key + step * 4))
    if width % per_step:
        write_half(target + width // 2 * 64, read_half(key + (width - 1) * 2))
    target = values + group * value_group + lane // per_step * value_step
    if size == 4:
        copy_bytes(target, value, width * 4)
    else:
        for place in range(width):
            write_half(target + place * 4 + lane % 2 * 2, read_half(value + place * 2))


@kernel(14, "kv_write")
def _write(task: Any, thread: Any, a: Any) -> None:
    key, key_stride, key_head, value, value_stride, value_head, slots = (
        *(a[0], a[1], a[2], a[3], a[4], a[5], a[6]),
    )
    count, heads, width, size, block_size, keys, values = (
        *(a[7], a[8], a[9], a[10], a[11], a[12], a[13]),
    )
    for row in range(task * 8, min(count, (task + 1) * 8)):
        slot = read_int(slots + row * 8)
        if slot < 0:
            continue
        for head in range(heads):
            store_head(
                key + row * key_stride + head * key_head,
                value + row * value_stride + head * value_head,
                width,
                size,
                slot,
                head,
                heads,
                block_size,
                keys,
                values,
            )
