"""A decoder layer for serving: packed weights, rows instead of sequences.

T rows, H hidden size, D head size. Each operation is one of ``shoal.ops.fixed``, or elementwise
with one rounding, so with ``FixedPacking`` a row's bits depend on that row and its cache alone;
they are the bits of ``shoal.models.Decoder`` under ``shoal.ops.fixed_order``, whose operations
these are too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from shoal.inference.forward.packing import Packing
from shoal.inference.forward.rows import Rows
from shoal.models import DecoderConfig
from shoal.models.families import QueryKeyNorm
from shoal.ops import fixed

Weights = Callable[[str], torch.Tensor]
"""A whole parameter by its name within the layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """What the layers of one step share: where its rows stand."""

    rows: Rows
    cache: fixed.KVCache
    cosine: torch.Tensor
    """``[T, D/2]`` fp32."""
    sine: torch.Tensor
    """The same."""
    wanted: torch.Tensor | None
    """``[W]`` int64: the rows whose output the last layer is to give; None for all."""


class ServedAttention:
    """Causal self-attention of layer ``layer``, queries, keys and values by one product."""

    def __init__(
        self, config: DecoderConfig, layer: int, weights: Weights, packing: Packing
    ) -> None:
        self.layer = layer
        self.window = config.windows[layer]
        self.scale = config.head_dim**-0.5
        queries, keys = (
            heads * config.head_dim for heads in (config.num_heads, config.num_key_value_heads)
        )
        self.widths = (queries, keys, keys)
        self.clip, self.epsilon = config.clip_qkv, config.rms_norm_eps
        names = [f"{name}_proj" for name in ("q", "k", "v")]
        bias = None
        if config.query_key_value_bias:
            bias = torch.cat([weights(f"{name}.bias") for name in names])
        fused = torch.cat([weights(f"{name}.weight") for name in names])
        self.inputs = packing.linear(fused, bias)
        output_bias = weights("o_proj.bias") if config.output_bias else None
        self.output = packing.linear(weights("o_proj.weight"), output_bias)
        self.head_norms = self.whole_norms = None
        if config.query_key_norm is not QueryKeyNorm.NONE:
            norms = weights("q_norm.weight"), weights("k_norm.weight")
            if config.query_key_norm is QueryKeyNorm.HEAD:
                self.head_norms = norms
            else:
                self.whole_norms = norms

    def __call__(
        self, hidden: torch.Tensor, place: Place, wanted: torch.Tensor | None
    ) -> torch.Tensor:
        """``hidden`` ``[T, H]`` to the same, or to ``[W, H]`` for the ``wanted`` rows."""
        query, key, value = self._projections(hidden)
        rows, cache = place.rows, place.cache
        query = fixed.place_heads(
            query,
            key,
            value,
            place.cosine,
            place.sine,
            cache,
            self.layer,
            rows.slots,
            self.head_norms,
            self.epsilon,
        )
        sequences, positions = rows.sequences, rows.positions
        if wanted is not None:
            query, sequences, positions = query[wanted], sequences[wanted], positions[wanted]
        attended = fixed.paged_attention(
            query,
            cache,
            self.layer,
            rows.block_tables,
            sequences,
            positions,
            self.scale,
            self.window,
        )
        return self.output(attended.flatten(1))

    def _projections(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Query, key and value, each ``[T, heads * D]``, before the norms of heads."""
        query, key, value = self.inputs(hidden).split(self.widths, dim=1)
        if self.whole_norms is not None:
            query = fixed.rms_norm(query, self.whole_norms[0], self.epsilon)
            key = fixed.rms_norm(key, self.whole_norms[1], self.epsilon)
        if self.clip is not None:
            query, key, value = (fixed.clamped(x, self.clip) for x in (query, key, value))
        return query, key, value


class ServedMLP:
    """``down(silu(gate(x)) * up(x))``, gate and up by one product."""

    def __init__(self, weights: Weights, packing: Packing, *, bias: bool = False) -> None:
        fused = torch.cat([weights("gate_proj.weight"), weights("up_proj.weight")])
        fused_bias = None
        if bias:
            fused_bias = torch.cat([weights("gate_proj.bias"), weights("up_proj.bias")])
        self.gate_up = packing.linear(fused, fused_bias)
        down_bias = weights("down_proj.bias") if bias else None
        self.down = packing.linear(weights("down_proj.weight"), down_bias)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[T, H]`` to the same."""
        gate, up = self.gate_up(hidden).chunk(2, dim=1)
        return self.down(fixed.swiglu(gate, up))


class ServedExperts:
    """A mixture of experts in the place of the MLP."""

    def __init__(self, config: DecoderConfig, weights: Weights, packing: Packing) -> None:
        experts = config.experts
        assert experts is not None
        self.per_token, self.normalize = experts.experts_per_token, experts.normalize_weights
        self.router = packing.linear(weights("gate.weight").float(), kind="fp32")
        self.experts = packing.experts(
            weights("experts.gate_up_proj"), weights("experts.down_proj"), experts.num_experts
        )
        self.shared = None
        if experts.shared_intermediate_size is not None:
            self.shared = ServedMLP(lambda name: weights(f"shared_expert.{name}"), packing)
            gate = weights("shared_expert_gate.weight")
            self.shared_gate = packing.linear(gate, kind="fp32")

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[T, H]`` to the same."""
        wide = fixed.widened(hidden)
        choices, shares = fixed.route(self.router(wide), self.per_token, normalize=self.normalize)
        output = self.experts(hidden, choices, shares)
        if self.shared is None:
            return output
        return fixed.add_gated(output, self.shared(hidden), self.shared_gate(wide))


class ServedLayer:
    """Attention and MLP, each on normalized input and added to it."""

    def __init__(
        self, config: DecoderConfig, layer: int, weights: Weights, packing: Packing
    ) -> None:
        self.epsilon = config.rms_norm_eps
        self.attention_norm = weights("input_layernorm.weight")
        self.mlp_norm = weights("post_attention_layernorm.weight")
        self.attention = ServedAttention(
            config, layer, lambda name: weights(f"self_attn.{name}"), packing
        )
        self.mlp: ServedMLP | ServedExperts
        if config.sparse_layers[layer]:
            self.mlp = ServedExperts(config, lambda name: weights(f"mlp.{name}"), packing)
        else:
            self.mlp = ServedMLP(lambda name: weights(f"mlp.{name}"), packing, bias=config.mlp_bias)
        self.is_last = layer == config.num_layers - 1

    def __call__(
        self, hidden: torch.Tensor, added: torch.Tensor | None, place: Place
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream ``[T, H]`` fp32 and what is still to be added to it, to the same.

        The last layer gives both for the wanted rows alone: of the others it needs but the keys
        and values.
        """
        if added is None:
            normalized = fixed.rms_norm(
                hidden, self.attention_norm, self.epsilon, dtype=self.attention_norm.dtype
            )
        else:
            hidden, normalized = fixed.add_rms_norm(
                hidden, added, self.attention_norm, self.epsilon
            )
        wanted = place.wanted if self.is_last else None
        attended = self.attention(normalized, place, wanted)
        if wanted is not None:
            hidden = hidden[wanted]
        hidden, normalized = fixed.add_rms_norm(hidden, attended, self.mlp_norm, self.epsilon)
        return hidden, self.mlp(normalized)
