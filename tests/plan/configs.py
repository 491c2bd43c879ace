"""Small configurations for the tests of plans."""

from __future__ import annotations

from typing import Any

from shoal.config import Config, config_from_tree

DENSE = {
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 66,
    "intermediate_size": 90,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
EXPERTS = {
    "model_type": "qwen3_moe",
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 20,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "mlp_only_layers": [1],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
}


def tree(**sections: dict[str, Any]) -> dict[str, Any]:
    """A configuration of the dense model as in a file; ``sections`` are laid over the ones here."""
    values: dict[str, Any] = {
        "model": {"config": DENSE},
        "data": {"sources": [{"path": __file__}], "seq_len": 16},
        "train": {"steps": 4},
        "precision": {"compute": "fp32"},
        "cluster": {"device": "cpu"},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return values


def config(**sections: dict[str, Any]) -> Config:
    """The same, checked."""
    return config_from_tree(tree(**sections))
