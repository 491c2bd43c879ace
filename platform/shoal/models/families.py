"""The decoder families and what a Hugging Face config of each means where it is silent.

The defaults are those of the ``transformers`` configuration classes, version 5, so that the same
file describes the same model here and there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any


class Biases(Enum):
    """Where a family's attention has biases."""

    NONE = "none"
    """Nowhere."""
    CONFIGURED = "attention_bias"
    """On query, key, value and output alike, if ``attention_bias`` says so."""
    QKV = "qkv"
    """On query, key and value always."""
    CONFIGURED_QKV = "qkv_bias"
    """On query, key and value, if ``qkv_bias`` says so."""


class QueryKeyNorm(Enum):
    """How queries and keys are normalized before the rotation."""

    NONE = "none"
    HEAD = "head"
    """Each head by itself (Qwen3)."""
    FULL = "full"
    """All heads of a token together (OLMoE)."""


class Windows(Enum):
    """Which layers see only a sliding window of the past."""

    NONE = "none"
    """No layer."""
    ALL = "all"
    """Every layer, if ``sliding_window`` is set."""
    ALL_IF_USED = "use_sliding_window"
    """Every layer, if ``use_sliding_window`` says so."""
    UPPER = "upper"
    """Layers from ``max_window_layers`` up, if ``use_sliding_window`` says so."""
    UPPER_IF_SET = "upper_if_set"
    """Layers from ``max_window_layers`` up, if ``sliding_window`` is set."""
    LOWER_EVEN = "lower_even"
    """Layers 0, 2, ... below ``max_window_layers``, likewise (Qwen2-MoE)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """What sets one family apart."""

    architecture: str
    """Class name that ``config.json`` carries."""

    defaults: Mapping[str, Any]
    """Every key the family reads, with its value where the file is silent."""

    biases: Biases = Biases.NONE
    query_key_norm: QueryKeyNorm = QueryKeyNorm.NONE
    windows: Windows = Windows.NONE

    expert_width: str | None = None
    """Key that holds the width of a routed expert; None for dense families."""

    always_normalize: bool = False
    """Whether the chosen experts' weights always sum to one, without a ``norm_topk_prob`` key."""

    selection_bias: bool = False
    """Whether experts are chosen by sigmoids and a bias, as in DeepSeek-V3, and share a token with
    experts that every token visits."""


def _defaults(**own: Any) -> Mapping[str, Any]:
    common: dict[str, Any] = {
        "num_key_value_heads": None,
        "head_dim": None,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_dropout": 0.0,
        "rope_theta": 10_000.0,
    }
    return MappingProxyType(common | own)


_QWEN = {
    "vocab_size": 151_936,
    "max_position_embeddings": 32_768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "layer_types": None,
}

_SPARSE_QWEN = {"decoder_sparse_step": 1, "mlp_only_layers": None, "router_aux_loss_coef": 0.001}

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family(
            architecture="LlamaForCausalLM",
            biases=Biases.CONFIGURED,
            defaults=_defaults(
                vocab_size=32_000,
                hidden_size=4096,
                intermediate_size=11_008,
                num_hidden_layers=32,
                num_attention_heads=32,
                max_position_embeddings=2048,
                attention_bias=False,
                mlp_bias=False,
            ),
        ),
        "mistral": Family(
            architecture="MistralForCausalLM",
            windows=Windows.ALL,
            defaults=_defaults(
                vocab_size=32_000,
                hidden_size=4096,
                intermediate_size=14_336,
                num_hidden_layers=32,
                num_attention_heads=32,
                num_key_value_heads=8,
                max_position_embeddings=131_072,
                sliding_window=4096,
            ),
        ),
        "qwen2": Family(
            architecture="Qwen2ForCausalLM",
            biases=Biases.QKV,
            windows=Windows.UPPER,
            defaults=_defaults(
                **_QWEN,
                hidden_size=4096,
                intermediate_size=22_016,
                num_hidden_layers=32,
                num_attention_heads=32,
                num_key_value_heads=32,
                max_window_layers=28,
            ),
        ),
        "qwen3": Family(
            architecture="Qwen3ForCausalLM",
            biases=Biases.CONFIGURED,
            query_key_norm=QueryKeyNorm.HEAD,
            windows=Windows.UPPER,
            defaults=_defaults(
                **_QWEN,
                hidden_size=4096,
                intermediate_size=22_016,
                num_hidden_layers=32,
                num_attention_heads=32,
                num_key_value_heads=32,
                head_dim=128,
                max_window_layers=28,
                attention_bias=False,
            ),
        ),
        "mixtral": Family(
            architecture="MixtralForCausalLM",
            windows=Windows.ALL,
            expert_width="intermediate_size",
            always_normalize=True,
            defaults=_defaults(
                vocab_size=32_000,
                hidden_size=4096,
                intermediate_size=14_336,
                num_hidden_layers=32,
                num_attention_heads=32,
                num_key_value_heads=8,
                max_position_embeddings=131_072,
                rms_norm_eps=1e-5,
                rope_theta=1_000_000.0,
                sliding_window=None,
                num_experts_per_tok=2,
                num_experts=8,
                router_aux_loss_coef=0.001,
                router_jitter_noise=0.0,
            ),
        ),
        "qwen2_moe": Family(
            architecture="Qwen2MoeForCausalLM",
            biases=Biases.CONFIGURED_QKV,
            windows=Windows.LOWER_EVEN,
            expert_width="moe_intermediate_size",
            defaults=_defaults(
                **_QWEN,
                **_SPARSE_QWEN,
                hidden_size=2048,
                intermediate_size=5632,
                num_hidden_layers=24,
                num_attention_heads=16,
                num_key_value_heads=16,
                max_window_layers=28,
                qkv_bias=True,
                moe_intermediate_size=1408,
                shared_expert_intermediate_size=5632,
                num_experts_per_tok=4,
                num_experts=60,
                norm_topk_prob=False,
            ),
        ),
        "qwen3_moe": Family(
            architecture="Qwen3MoeForCausalLM",
            biases=Biases.CONFIGURED,
            query_key_norm=QueryKeyNorm.HEAD,
            windows=Windows.ALL_IF_USED,
            expert_width="moe_intermediate_size",
            defaults=_defaults(
                **_QWEN,
                **_SPARSE_QWEN,
                hidden_size=2048,
                intermediate_size=6144,
                num_hidden_layers=24,
                num_attention_heads=32,
                num_key_value_heads=4,
                attention_bias=False,
                moe_intermediate_size=768,
                num_experts_per_tok=8,
                num_experts=128,
                norm_topk_prob=False,
            ),
        ),
        "olmoe": Family(
            architecture="OlmoeForCausalLM",
            biases=Biases.CONFIGURED,
            query_key_norm=QueryKeyNorm.FULL,
            expert_width="intermediate_size",
            defaults=_defaults(
                vocab_size=50_304,
                hidden_size=2048,
                intermediate_size=2048,
                num_hidden_layers=16,
                num_attention_heads=16,
                max_position_embeddings=4096,
                rms_norm_eps=1e-5,
                attention_bias=False,
                clip_qkv=None,
                num_experts_per_tok=8,
                num_experts=64,
                norm_topk_prob=False,
                router_aux_loss_coef=0.01,
            ),
        ),
        "dots1": Family(
            architecture="Dots1ForCausalLM",
            biases=Biases.CONFIGURED,
            query_key_norm=QueryKeyNorm.HEAD,
            windows=Windows.UPPER_IF_SET,
            expert_width="moe_intermediate_size",
            selection_bias=True,
            defaults=_defaults(
                vocab_size=152_064,
                hidden_size=4608,
                intermediate_size=10_944,
                num_hidden_layers=62,
                num_attention_heads=32,
                num_key_value_heads=32,
                max_position_embeddings=2048,
                sliding_window=4096,
                max_window_layers=62,
                layer_types=None,
                attention_bias=False,
                moe_intermediate_size=1408,
                first_k_dense_replace=0,
                n_shared_experts=None,
                n_routed_experts=None,
                num_experts_per_tok=None,
                n_group=1,
                topk_group=1,
                norm_topk_prob=False,
                routed_scaling_factor=1.0,
            ),
        ),
    }
)
"""Families by ``model_type``; SmolLM2 and Llama 2 and 3 are ``llama``."""
