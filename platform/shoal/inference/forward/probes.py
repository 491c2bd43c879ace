"""Which kernels a model uses, and in which shapes: what is certified when it is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from shoal.inference.forward.layer import ServedAttention, ServedExperts, ServedLayer, ServedMLP
from shoal.inference.forward.packing import Experts, Linear
from shoal.models import DecoderConfig
from shoal.ops import fixed
from shoal.ops.fixed import probes
from shoal.ops.fixed.certify import Certificate, KernelProof
from shoal.ops.fixed.probes import Probe
from shoal.ops.fixed.tiles import HAS_BF16_PRODUCTS

UNPROVEN = Certificate(
    kernels=(
        KernelProof(name="all", row_counts=(), failure="serve.batch_invariant is switched off"),
    ),
    threads=(),
    fingerprint="none",
    bf16_products=HAS_BF16_PRODUCTS,
)
"""Of a model whose products are not of fixed order."""


def model_probes(
    config: DecoderConfig, layers: Sequence[ServedLayer], head: Linear, block_size: int
) -> Iterator[Probe]:
    """Probes of every kernel; those of layers that are alike have the same name."""
    dtype = layers[0].attention_norm.dtype
    heads = config.num_heads, config.num_key_value_heads, config.head_dim
    yield probes.take_rows_probe(config.hidden_size, dtype)  # embedding
    yield probes.take_rows_probe(config.head_dim // 2, torch.float32)  # angles
    yield probes.norm_probe(config.hidden_size, torch.float32, out=dtype)
    yield probes.add_norm_probe(config.hidden_size, dtype)
    yield probes.linear_probe(_packed(head), dtype, out=torch.float32)
    yield probes.log_softmax_probe(config.vocab_size)
    for window in sorted(set(config.windows), key=lambda window: window or 0):
        yield probes.attention_probe(*heads, block_size, dtype, window)
    for layer in layers:
        yield from _attention_probes(layer.attention, heads, dtype)
        if isinstance(layer.mlp, ServedMLP):
            yield from _mlp_probes(layer.mlp, dtype)
        else:
            yield from _experts_probes(layer.mlp, dtype)


def _attention_probes(
    attention: ServedAttention, heads: tuple[int, int, int], dtype: torch.dtype
) -> Iterator[Probe]:
    queries, keys, _ = attention.widths
    yield _linear_probe(attention.inputs, dtype)
    if attention.whole_norms is not None:
        yield probes.norm_probe(queries, dtype)
        yield probes.norm_probe(keys, dtype)
    if attention.clip is not None:
        yield probes.clamped_probe(queries, dtype, attention.clip)
        yield probes.clamped_probe(keys, dtype, attention.clip)
    normalizes = attention.head_norms is not None
    yield probes.place_heads_probe(*heads, dtype, normalizes=normalizes)
    yield _linear_probe(attention.output, dtype)


def _mlp_probes(mlp: ServedMLP, dtype: torch.dtype) -> Iterator[Probe]:
    yield _linear_probe(mlp.gate_up, dtype)
    yield _linear_probe(mlp.down, dtype)
    yield probes.swiglu_probe(_packed(mlp.down).shape[1], dtype)


def _experts_probes(mlp: ServedExperts, dtype: torch.dtype) -> Iterator[Probe]:
    width = _packed(mlp.router).shape[1]
    yield probes.widened_probe(width, dtype)
    yield _linear_probe(mlp.router, torch.float32)
    yield probes.route_probe(_packed(mlp.router).shape[0], mlp.per_token)
    yield _experts_probe(mlp.experts, mlp.per_token, dtype)
    if mlp.shared is not None:
        yield from _mlp_probes(mlp.shared, dtype)
        yield _linear_probe(mlp.shared_gate, torch.float32)
        yield probes.add_gated_probe(width, dtype)


def _packed(linear: Linear) -> fixed.PackedLinear:
    assert isinstance(linear, fixed.PackedLinear), "vendor products are not probed"
    return linear


def _linear_probe(linear: Linear, dtype: torch.dtype) -> Probe:
    return probes.linear_probe(_packed(linear), dtype)


def _experts_probe(experts: Experts, per_token: int, dtype: torch.dtype) -> Probe:
    assert isinstance(experts, fixed.PackedExperts), "vendor products are not probed"
    return probes.experts_probe(experts, per_token, dtype)
