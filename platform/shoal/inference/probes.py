"""Which kernels a model uses, and in which shapes: what is certified when it is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from shoal.inference.layer import ServedExperts, ServedLayer, ServedMLP
from shoal.models import DecoderConfig
from shoal.ops import fixed
from shoal.ops.fixed.probes import (
    Probe,
    attention_probe,
    experts_probe,
    linear_probe,
    log_softmax_probe,
    norm_probe,
    rotate_probe,
    route_probe,
    swiglu_probe,
)


def model_probes(
    config: DecoderConfig, layers: Sequence[ServedLayer], head: fixed.PackedLinear, block_size: int
) -> Iterator[Probe]:
    """Probes of every kernel; those of layers that are alike have the same name."""
    dtype = layers[0].attention_norm.dtype
    heads = config.num_heads, config.num_key_value_heads, config.head_dim
    yield norm_probe(config.hidden_size, torch.float32)
    yield rotate_probe(*heads, dtype)
    yield linear_probe(head, dtype)
    yield log_softmax_probe(config.vocab_size)
    for window in sorted(set(config.windows), key=lambda window: window or 0):
        yield attention_probe(*heads, block_size, dtype, window)
    for layer in layers:
        yield linear_probe(layer.attention.inputs, dtype)
        yield linear_probe(layer.attention.output, dtype)
        if isinstance(layer.mlp, ServedMLP):
            yield from _mlp_probes(layer.mlp, dtype)
        else:
            yield from _experts_probes(layer.mlp, dtype)


def _mlp_probes(mlp: ServedMLP, dtype: torch.dtype) -> Iterator[Probe]:
    yield linear_probe(mlp.gate_up, dtype)
    yield linear_probe(mlp.down, dtype)
    yield swiglu_probe(mlp.down.shape[1], dtype)


def _experts_probes(mlp: ServedExperts, dtype: torch.dtype) -> Iterator[Probe]:
    yield linear_probe(mlp.router, torch.float32)
    yield route_probe(mlp.router.shape[0], mlp.per_token)
    yield experts_probe(mlp.experts, mlp.per_token, dtype)
    if mlp.shared is not None:
        yield from _mlp_probes(mlp.shared, dtype)
        yield linear_probe(mlp.shared_gate, torch.float32)
