"""What is proven of each kernel: its outputs for any choice among fixed rows of input.

The rows are made by integer arithmetic alone, so every machine and version has the same. Among them
are plain ones, sums that cancel, magnitudes far apart, subnormal numbers, and some with infinities
and with what is no number, which must not spill into their neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from shoal.ops.fixed.attention import paged_attention
from shoal.ops.fixed.elementwise import add_gated, clamped, take_rows, widened
from shoal.ops.fixed.experts import PackedExperts
from shoal.ops.fixed.heads import place_heads
from shoal.ops.fixed.kv_cache import GROUP, KVCache
from shoal.ops.fixed.linear import PackedLinear
from shoal.ops.fixed.norm import add_rms_norm, rms_norm
from shoal.ops.fixed.softmax import log_softmax, route
from shoal.ops.fixed.swiglu import swiglu

NUM_ROWS = 72
"""Rows of each probe."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """A kernel on fixed inputs."""

    name: str
    """Kernel, kind and shape, as the certificate shows them."""
    compute: Callable[[torch.Tensor], torch.Tensor]
    """Output rows for the input rows of these numbers, int64 ``[T]``, any of ``NUM_ROWS``."""


def hard_rows(count: int, width: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """``[count, width]`` of eight sorts in turn, plain to impossible."""
    index = torch.arange(count * width, dtype=torch.int64).view(count, width)
    rows = uniform(index, salt)
    place = torch.arange(width)
    for row in range(count):
        rows[row] = _SORTS[row % len(_SORTS)](rows[row], place)
    return rows.to(dtype)


# From plain numbers in [-1, 1) and their places along the row.
_SORTS: tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], ...] = (
    lambda plain, place: plain,
    lambda plain, place: plain * 64,
    lambda plain, place: plain * (_mixed(place, 1) % 41 - 20).double().exp2(),  # far apart
    lambda plain, place: (1 - 2 * (place % 2)) * (plain.abs() + 1) * 2.0**12,  # cancel
    lambda plain, place: plain * 2.0**-130,  # subnormal
    lambda plain, place: plain * (place % 5 == 0),  # mostly zeros
    lambda plain, place: plain.where(place != len(place) // 2, float("inf")),
    lambda plain, place: plain.where(place != len(place) // 3, float("nan")),
)


def uniform(index: torch.Tensor, salt: int = 0) -> torch.Tensor:
    """A number in [-1, 1) for each of the integers ``index``, fp64 but exact in fp32."""
    return (_mixed(index, salt) % 2**20).double() / 2.0**19 - 1


def _mixed(index: torch.Tensor, salt: int) -> torch.Tensor:
    """Well mixed non-negative integers (the finalizer of a 31-bit multiplicative hash)."""
    bits = (index + 7919 * salt + 1) * 2654435761 % 2**31
    bits = (bits ^ (bits >> 15)) * 739982445 % 2**31
    return (bits ^ (bits >> 12)) * 695872825 % 2**31 >> 8


def linear_probe(
    linear: PackedLinear, dtype: torch.dtype, *, out: torch.dtype | None = None
) -> Probe:
    """``linear`` on rows of ``dtype``, to ``out``, by default the same."""
    columns, inner = linear.shape
    rows = hard_rows(NUM_ROWS, inner, dtype)
    return Probe(
        name=f"linear {linear.kind} {columns}x{inner}"
        + ("" if out is None else f" to {_short(out)}"),
        compute=lambda chosen: linear(rows[chosen], dtype=out),
    )


def experts_probe(experts: PackedExperts, per_token: int, dtype: torch.dtype) -> Probe:
    """``experts`` on rows of ``dtype`` that each visit ``per_token`` of them, some much visited."""
    num, inner = experts.num_experts, experts.gate_up.inner
    rows = hard_rows(NUM_ROWS, inner, dtype)
    scores = hard_rows(NUM_ROWS, num, torch.float32, salt=2)
    scores[:: NUM_ROWS // 10, : num // 2] += 4.0
    choices, weights = route(scores, per_token, normalize=False)
    weights = torch.full_like(weights, 1 / per_token).where(weights.isnan(), weights)
    return Probe(
        name=f"experts {experts.kind} {num}x{experts.down.columns}x{experts.down.inner}",
        compute=lambda chosen: experts(rows[chosen], choices[chosen], weights[chosen]),
    )


def attention_probe(
    num_heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    window: int | None = None,
) -> Probe:
    """Attention of rows of three sequences, at their ends and at borders of blocks."""
    lengths, blocks_of = (1, 65, 200), -(-200 // block_size)
    cache = KVCache(3 * blocks_of + 1, block_size, 1, kv_heads, head_dim, dtype)
    # Neighbouring blocks of a sequence are far apart, in falling order.
    table = torch.arange(3 * blocks_of, 0, -1).view(blocks_of, 3).t().contiguous()
    for sequence, length in enumerate(lengths):
        position = torch.arange(length)
        slots = table[sequence][position // block_size] * block_size + position % block_size
        index = torch.arange(2 * length * kv_heads * head_dim)
        key, value = (
            uniform(index, sequence + 3).view(2, length, kv_heads, head_dim).to(dtype).unbind()
        )
        cache.write(0, key * 4, value, slots)
    rows = [(0, 0)] + [(1, p) for p in range(50, 65)] + [(2, p) for p in range(144, 200)]
    sequences, positions = torch.tensor(rows, dtype=torch.int32).unbind(1)
    index = torch.arange(NUM_ROWS * num_heads * head_dim)
    query = uniform(index, 9).view(NUM_ROWS, num_heads, head_dim).to(dtype)
    scale = head_dim**-0.5
    return Probe(
        name=f"attention {_short(dtype)} {num_heads}/{kv_heads} heads of {head_dim}"
        + ("" if window is None else f", window {window}"),
        compute=lambda chosen: paged_attention(
            query[chosen],
            cache,
            0,
            table.int(),
            sequences[chosen],
            positions[chosen],
            scale,
            window,
        ),
    )


def norm_probe(width: int, dtype: torch.dtype, *, out: torch.dtype | None = None) -> Probe:
    """``rms_norm`` over ``width`` numbers of ``dtype``, to ``out``, by default the same."""
    rows = hard_rows(NUM_ROWS, width, dtype)
    weight = uniform(torch.arange(width), 4).to(out or dtype)
    return Probe(
        name=f"rms_norm {_short(dtype)} {width}" + ("" if out is None else f" to {_short(out)}"),
        compute=lambda chosen: rms_norm(rows[chosen], weight, 1e-6, dtype=out),
    )


def add_norm_probe(width: int, dtype: torch.dtype) -> Probe:
    """``add_rms_norm`` of rows of ``dtype`` to an fp32 stream; sums and norms side by side."""
    stream, added = hard_rows(NUM_ROWS, width, torch.float32), hard_rows(NUM_ROWS, width, dtype, 11)
    weight = uniform(torch.arange(width), 4).to(dtype)

    def compute(chosen: torch.Tensor) -> torch.Tensor:
        sums, out = add_rms_norm(stream[chosen], added[chosen], weight, 1e-6)
        return torch.cat((sums, out.float()), dim=1)

    return Probe(name=f"add_rms_norm {_short(dtype)} {width}", compute=compute)


def swiglu_probe(width: int, dtype: torch.dtype) -> Probe:
    """``swiglu`` of ``width`` numbers."""
    gate, up = hard_rows(NUM_ROWS, width, dtype), hard_rows(NUM_ROWS, width, dtype, salt=5)
    return Probe(
        name=f"swiglu {_short(dtype)} {width}",
        compute=lambda chosen: swiglu(gate[chosen], up[chosen]),
    )


def take_rows_probe(width: int, dtype: torch.dtype) -> Probe:
    """``take_rows`` of a table of ``dtype``, each row from a place of its own."""
    table = hard_rows(NUM_ROWS, width, dtype, salt=7)
    return Probe(
        name=f"take_rows {_short(dtype)} {width}",
        compute=lambda chosen: take_rows(table, chosen),
    )


def widened_probe(width: int, dtype: torch.dtype) -> Probe:
    """``widened`` rows of ``dtype``."""
    rows = hard_rows(NUM_ROWS, width, dtype)
    return Probe(
        name=f"widened {_short(dtype)} {width}", compute=lambda chosen: widened(rows[chosen])
    )


def clamped_probe(width: int, dtype: torch.dtype, bound: float) -> Probe:
    """``clamped`` rows of ``dtype``."""
    rows = hard_rows(NUM_ROWS, width, dtype)
    return Probe(
        name=f"clamped {_short(dtype)} {width}",
        compute=lambda chosen: clamped(rows[chosen], bound),
    )


def add_gated_probe(width: int, dtype: torch.dtype) -> Probe:
    """``add_gated`` of rows of ``dtype``, with a score for each."""
    output, shared = hard_rows(NUM_ROWS, width, dtype), hard_rows(NUM_ROWS, width, dtype, salt=8)
    scores = hard_rows(NUM_ROWS, 1, torch.float32, salt=10)
    return Probe(
        name=f"add_gated {_short(dtype)} {width}",
        compute=lambda chosen: add_gated(output[chosen], shared[chosen], scores[chosen]),
    )


def place_heads_probe(
    num_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, *, normalizes: bool
) -> Probe:
    """``place_heads``: a row's queries, and the block of the cache that is its own, side by side.

    The cosines and sines are fp32.
    """
    widths = num_heads * head_dim, kv_heads * head_dim, kv_heads * head_dim
    fused = hard_rows(NUM_ROWS, sum(widths), dtype)
    angle = uniform(torch.arange(NUM_ROWS * (head_dim // 2)), 6).view(NUM_ROWS, -1).float()
    cosine, sine = angle.cos(), angle.sin()
    norms = None
    if normalizes:
        first, second = uniform(torch.arange(2 * head_dim), 12).to(dtype).split(head_dim)
        norms = first, second
    cache = KVCache(NUM_ROWS, GROUP, 1, kv_heads, head_dim, dtype)

    def compute(chosen: torch.Tensor) -> torch.Tensor:
        query, key, value = fused[chosen].split(widths, dim=1)
        cache.keys.zero_()
        cache.values.zero_()
        slots = chosen * GROUP + chosen % GROUP
        angles = cosine[chosen], sine[chosen]
        queries = place_heads(query, key, value, *angles, cache, 0, slots, norms, 1e-6)
        stored = (x[0, chosen].flatten(1).view(dtype) for x in (cache.keys, cache.values))
        return torch.cat((queries.flatten(1), *stored), dim=1)

    return Probe(
        name=f"place_heads {_short(dtype)} {num_heads}/{kv_heads} heads of {head_dim}"
        + (", normalized" if normalizes else ""),
        compute=compute,
    )


def log_softmax_probe(vocabulary: int) -> Probe:
    """``log_softmax`` of so many logits."""
    logits = hard_rows(NUM_ROWS, vocabulary, torch.float32)
    return Probe(
        name=f"log_softmax fp32 {vocabulary}", compute=lambda chosen: log_softmax(logits[chosen])
    )


def route_probe(num_experts: int, per_token: int) -> Probe:
    """``route``: the experts chosen and their weights, side by side; ties among the scores."""
    scores = hard_rows(NUM_ROWS, num_experts, torch.float32)
    scores = scores.where(scores.abs() > 0.25, 0.25)

    def compute(chosen: torch.Tensor) -> torch.Tensor:
        choices, weights = route(scores[chosen], per_token, normalize=True)
        return torch.cat((choices.float(), weights), dim=1)

    return Probe(name=f"route fp32 {num_experts} top {per_token}", compute=compute)


def _short(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
