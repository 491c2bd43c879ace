"""Hugging Face configs of decoders with a few thousand weights, one for each family and feature.

Odd sizes on purpose: 257 tokens, a hidden size of 66 where the family's heads allow it.
"""

from __future__ import annotations

from typing import Any

_COMMON: dict[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 66,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": None,
}

TINY: dict[str, dict[str, Any]] = {
    "llama2": _COMMON
    | {"model_type": "llama", "num_key_value_heads": 3, "rms_norm_eps": 1e-5, "rope_theta": 1e4},
    "llama3": _COMMON
    | {
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "rope_theta": 5e5,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "smollm2": _COMMON | {"model_type": "llama", "tie_word_embeddings": True, "rope_theta": 1e5},
    "mistral": _COMMON | {"model_type": "mistral", "sliding_window": 5, "head_dim": 10},
    "qwen2": _COMMON
    | {
        "model_type": "qwen2",
        "tie_word_embeddings": True,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "qwen3": _COMMON | {"model_type": "qwen3", "head_dim": 16, "rope_theta": 1e6},
    "mixtral": _COMMON
    | {"model_type": "mixtral", "num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen2_moe": _COMMON
    | {
        "model_type": "qwen2_moe",
        "num_hidden_layers": 3,
        "moe_intermediate_size": 14,
        "shared_expert_intermediate_size": 22,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "mlp_only_layers": [1],
        "rope_scaling": {"type": "linear", "factor": 2.0},
    },
    "qwen3_moe": _COMMON
    | {
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "moe_intermediate_size": 14,
        "num_experts": 7,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
    "olmoe": _COMMON
    | {
        "model_type": "olmoe",
        "intermediate_size": 14,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "clip_qkv": 0.8,
        "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
    },
    "dots1": _COMMON
    | {
        "model_type": "dots1",
        "num_hidden_layers": 3,
        "head_dim": 16,
        "sliding_window": 5,
        "max_window_layers": 2,
        "moe_intermediate_size": 14,
        "first_k_dense_replace": 1,
        "n_routed_experts": 7,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
}
"""Configs by name; ``smollm2`` is the smallest dense one with a tied head."""

SERVED = [name for name in TINY if name != "dots1"]
"""Those that the engine computes."""
