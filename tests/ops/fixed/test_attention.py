"""Paged attention: any chunks and company, the same bits; close to a plain softmax in fp64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

from shoal.errors import ConfigError
from shoal.ops.fixed import KVCache, paged_attention
from shoal.ops.on_threads import on_threads
from tests.ops.fixed.company import assert_independent, same_bits

BF16, FP32 = torch.bfloat16, torch.float32


@dataclass(frozen=True, kw_only=True)
class Shape:
    head_dim: int
    heads: int
    kv_heads: int
    block_size: int = 16
    dtype: torch.dtype = BF16
    window: int | None = None


class Sequences:
    """Random sequences in a cache whose blocks lie anywhere, and which is poisoned around them."""

    def __init__(self, shape: Shape, lengths: tuple[int, ...]) -> None:
        self.shape, self.lengths = shape, lengths
        generator = torch.Generator().manual_seed(shape.head_dim)
        most = max(-(-length // shape.block_size) for length in lengths) + 1
        num_blocks = len(lengths) * most + 3
        blocks = torch.randperm(num_blocks, generator=generator)[: len(lengths) * most]
        self.table = blocks.view(len(lengths), most).int()
        self.cache = KVCache(
            num_blocks, shape.block_size, 2, shape.kv_heads, shape.head_dim, shape.dtype
        )
        poison = torch.full((), float("nan"), dtype=shape.dtype).expand(
            num_blocks * shape.block_size, shape.kv_heads, shape.head_dim
        )
        self.cache.write(1, poison, poison, torch.arange(len(poison)))
        queries, expected, rows = [], [], []
        for sequence, length in enumerate(lengths):
            query, key, value = (
                torch.randn(length, heads, shape.head_dim, generator=generator).to(shape.dtype)
                for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
            )
            position = torch.arange(length)
            block = self.table[sequence].long()[position // shape.block_size]
            slots = block * shape.block_size + position % shape.block_size
            for chunk in torch.arange(length).split(23):
                self.cache.write(1, key[chunk], value[chunk], slots[chunk])
            queries.append(query)
            expected.append(plain_attention(query, key, value, shape.window))
            rows += [(sequence, p) for p in range(length)]
        self.query, self.expected = torch.cat(queries), torch.cat(expected)
        self.sequence, self.position = torch.tensor(rows, dtype=torch.int32).unbind(1)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Attention of these rows."""
        return paged_attention(
            self.query[rows],
            self.cache,
            1,
            self.table,
            self.sequence[rows],
            self.position[rows],
            self.shape.head_dim**-0.5,
            self.shape.window,
        )


def plain_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None
) -> torch.Tensor:
    """Softmax attention of one sequence in fp64: ``[L, heads, D]``."""
    length, heads, width = query.shape
    query, key, value = (x.double().transpose(0, 1) for x in (query, key, value))
    key, value = (x.repeat_interleave(heads // x.shape[0], dim=0) for x in (key, value))
    scores = query @ key.transpose(1, 2) / math.sqrt(width)
    position = torch.arange(length)
    hidden = position > position.unsqueeze(1)
    if window is not None:
        hidden |= position <= position.unsqueeze(1) - window
    weights = scores.masked_fill(hidden, -math.inf).softmax(dim=-1)
    return (weights @ value).transpose(0, 1)


SHAPES = [
    Shape(head_dim=16, heads=4, kv_heads=1),
    Shape(head_dim=32, heads=3, kv_heads=3, block_size=48, window=20),
    Shape(head_dim=33, heads=4, kv_heads=2),
    Shape(head_dim=64, heads=4, kv_heads=2, block_size=64),
    Shape(head_dim=80, heads=2, kv_heads=1, block_size=128, window=70),
    Shape(head_dim=96, heads=2, kv_heads=2, dtype=FP32),
    Shape(head_dim=128, heads=8, kv_heads=1, block_size=32),
    Shape(head_dim=33, heads=2, kv_heads=1, dtype=FP32, window=1),
    Shape(head_dim=16, heads=40, kv_heads=1),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_are_close_to_fp64_and_do_not_depend_on_each_other(shape: Shape) -> None:
    sequences = Sequences(shape, (1, 2, 15, 64, 65, 131))
    result = assert_independent(sequences, sum(sequences.lengths))
    tolerance = 0.02 if shape.dtype == BF16 else 1e-5
    torch.testing.assert_close(result.double(), sequences.expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("chunk", [1, 5, 16, 63, 64, 65, 200, 700])
def test_a_prompt_may_be_cut_into_any_chunks(chunk: int) -> None:
    sequences = Sequences(Shape(head_dim=64, heads=4, kv_heads=2), (700,))
    with on_threads(1):
        whole = sequences(torch.arange(700))
        pieces = [sequences(piece) for piece in torch.arange(700).split(chunk)]
    assert same_bits(torch.cat(pieces), whole)
    torch.testing.assert_close(whole.double(), sequences.expected, rtol=0.02, atol=0.02)


def test_the_size_of_the_cache_blocks_changes_no_bits() -> None:
    results = []
    for block_size in (16, 64, 128):
        torch.manual_seed(0)
        shape = Shape(head_dim=32, heads=2, kv_heads=1, block_size=block_size)
        cache = KVCache(40, block_size, 1, 1, 32, BF16)
        query, key, value = (torch.randn(300, heads, 32).bfloat16() for heads in (2, 1, 1))
        cache.write(0, key, value, torch.arange(300))
        table = torch.arange(-(-300 // block_size)).int().unsqueeze(0)
        rows = torch.zeros(300).int(), torch.arange(300).int()
        results.append(paged_attention(query, cache, 0, table, *rows, shape.head_dim**-0.5))
    assert same_bits(results[0], results[1]) and same_bits(results[0], results[2])


def test_blocks_before_the_window_are_not_looked_at() -> None:
    shape = Shape(head_dim=32, heads=2, kv_heads=1, window=20)
    sequences = Sequences(shape, (150,))
    late = torch.arange(140, 150)
    expected = sequences(late)
    # Positions 0-111 are gone: neither the blocks' numbers nor what is in them may matter.
    sequences.table[0, :7] = -1
    assert same_bits(sequences(late), expected)


def test_what_comes_later_is_never_seen() -> None:
    sequences = Sequences(Shape(head_dim=64, heads=2, kv_heads=1), (100,))
    before = sequences(torch.arange(100))
    block, inside = divmod(70, 16)
    slot = int(sequences.table[0, block]) * 16 + inside
    infinite = torch.full((1, 1, 64), float("inf")).bfloat16()
    sequences.cache.write(1, infinite, infinite, torch.tensor([slot]))
    after = sequences(torch.arange(100))
    assert same_bits(after[:70], before[:70])
    assert not after[70:].isfinite().any()


def test_negative_slots_write_nothing_and_layers_are_apart() -> None:
    cache = KVCache(2, 16, 2, 1, 16, BF16)
    rows = torch.randn(4, 1, 16).bfloat16()
    cache.write(1, rows, rows, torch.tensor([-1, 3, -1, 17]))
    assert int((cache.keys[0] != 0).sum()) == int((cache.values[0] != 0).sum()) == 0
    assert int((cache.keys[1] != 0).sum()) == 2 * 8
    assert int((cache.values[1] != 0).sum()) == 2 * 16


def test_strided_queries_keys_and_values() -> None:
    torch.manual_seed(0)
    fused = torch.randn(40, 4 + 2 + 2, 32).bfloat16()
    query, key, value = fused.split((4, 2, 2), dim=1)
    slots, table = torch.arange(40), torch.arange(3).int().unsqueeze(0)
    rows = torch.zeros(40).int(), torch.arange(40).int()
    results = []
    for copy in (False, True):
        if copy:
            query, key, value = (x.contiguous() for x in (query, key, value))
        cache = KVCache(3, 16, 1, 2, 32, BF16)
        cache.write(0, key, value, slots)
        results.append(paged_attention(query, cache, 0, table, *rows, 0.2))
    assert same_bits(*results)


def test_block_bytes_is_what_a_block_takes() -> None:
    for head_dim, dtype in ((64, BF16), (33, BF16), (80, FP32)):
        cache = KVCache(5, 32, 3, 2, head_dim, dtype)
        total = cache.keys.nbytes + cache.values.nbytes
        assert KVCache.block_bytes(32, 3, 2, head_dim, dtype) * 5 == total


def test_refusals() -> None:
    with pytest.raises(ConfigError, match=r"multiple of 16"):
        KVCache(1, 20, 1, 1, 16, BF16)
    with pytest.raises(ConfigError, match=r"bf16 or fp32"):
        KVCache(1, 16, 1, 1, 16, torch.float16)
    cache = KVCache(1, 16, 1, 1, 16, BF16)
    with pytest.raises(ValueError, match=r"does not hold"):
        cache.write(0, *(torch.zeros(1, 1, 16),) * 2, torch.zeros(1).long())
    row = torch.zeros(1).int()
    with pytest.raises(ValueError, match=r"does not fit"):
        paged_attention(torch.zeros(1, 1, 32).bfloat16(), cache, 0, row[None], row, row, 1.0)
