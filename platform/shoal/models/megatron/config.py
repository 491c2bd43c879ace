"""A decoder in the words of Megatron's command line, which its checkpoints carry along."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch

from shoal.errors import ConfigError
from shoal.models.config import DecoderConfig
from shoal.models.families import QueryKeyNorm

VOCABULARY_MULTIPLE = 128
"""Megatron's default of ``make_vocab_size_divisible_by``."""

_LLAMA3 = {"low_frequency": 1.0, "high_frequency": 4.0, "original_context": 8192}
"""What ``use_rope_scaling`` means besides its factor."""

_NEEDED: dict[str, tuple[Any, ...]] = {
    "normalization": ("RMSNorm",),
    "swiglu": (True,),
    "position_embedding_type": ("rope",),
    "rotary_percent": (1.0,),
    "rotary_interleaved": (False, None),
    "apply_layernorm_1p": (False, None),
    "num_experts": (None, 0),
    "multi_latent_attention": (False, None),
    "window_size": (None,),
    "mtp_num_layers": (None, 0),
    "qk_l2_norm": (False, None),
    "attention_output_gate": (False, None),
    "softmax_type": ("vanilla", None),
}
"""Arguments with the values that our families have; one that is absent has such a value."""


def padded_vocabulary(size: int) -> int:
    """Rows of Megatron's embedding table for ``size`` entries."""
    return -(-size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def check_dense_gpt(config: DecoderConfig) -> None:
    """Raise ``ConfigError`` for a decoder that Megatron Core's dense GPT cannot be."""
    rotary = config.rotary
    biases = (config.query_key_value_bias, config.output_bias, config.mlp_bias)
    if config.experts is not None:
        raise _unlike(config, "mixtures of experts", "a dense model")
    if any(window is not None for window in config.windows):
        raise _unlike(config, "sliding windows", "a model whose layers see everything before")
    if config.query_key_norm is QueryKeyNorm.FULL:
        raise _unlike(config, "norms over all heads together", "a model with norms of each head")
    if biases not in ((False, False, False), (True, False, False), (True, True, True)):
        problem = "biases of attention's output without those of the MLP, or the other way round"
        raise _unlike(config, problem, "a model with all biases, those of attention's input, none")
    own = {name: getattr(rotary, name) for name in _LLAMA3}
    if rotary.kind not in ("default", "linear", "llama3") or (
        rotary.kind == "llama3" and own != _LLAMA3
    ):
        raise _unlike(config, f"such {rotary.kind} rotary scaling", "linear or Llama 3's scaling")


def _unlike(config: DecoderConfig, problem: str, remedy: str) -> ConfigError:
    return ConfigError(
        "--format",
        "megatron",
        f"this {config.model_type} model has {problem}, which Megatron Core's dense GPT has not",
        f"Take {remedy}, or leave --format out",
    )


def arguments_of(config: DecoderConfig, dtype: torch.dtype) -> Namespace:
    """Megatron's arguments for a decoder that ``check_dense_gpt`` lets pass."""
    rotary = config.rotary
    return Namespace(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_heads,
        group_query_attention=config.num_key_value_heads != config.num_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=config.head_dim,
        seq_length=config.max_position_embeddings,
        max_position_embeddings=config.max_position_embeddings,
        position_embedding_type="rope",
        use_rotary_position_embeddings=True,
        rotary_base=rotary.theta,
        rotary_percent=1.0,
        rotary_interleaved=False,
        rotary_seq_len_interpolation_factor=rotary.factor if rotary.kind == "linear" else None,
        use_rope_scaling=rotary.kind == "llama3",
        rope_scaling_factor=rotary.factor if rotary.kind == "llama3" else 8.0,
        swiglu=True,
        normalization="RMSNorm",
        norm_epsilon=config.rms_norm_eps,
        apply_layernorm_1p=False,
        qk_layernorm=config.query_key_norm is QueryKeyNorm.HEAD,
        add_bias_linear=config.output_bias,
        add_qkv_bias=config.query_key_value_bias,
        untie_embeddings_and_output_weights=not config.tie_word_embeddings,
        vocab_size=config.vocab_size,
        padded_vocab_size=padded_vocabulary(config.vocab_size),
        make_vocab_size_divisible_by=VOCABULARY_MULTIPLE,
        num_experts=None,
        attention_dropout=config.attention_dropout,
        hidden_dropout=0.0,
        init_method_std=config.initializer_range,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        bf16=dtype is torch.bfloat16,
        fp16=False,
        params_dtype=dtype,
    )


def hf_config_of(arguments: Namespace, where: str) -> dict[str, Any]:
    """The Hugging Face config of the same decoder; ``where`` is the checkpoint, for messages.

    Raises ``ConfigError`` for an argument that none of our dense families can follow.
    """
    given = vars(arguments)
    for name, values in _NEEDED.items():
        value = given.get(name, values[0])
        if value not in values:
            raise ConfigError(
                "SOURCE",
                where,
                f"it was trained with {name} = {value}, which no supported family has",
                f"Give one with {name} = {values[0]}",
            )

    def needed(name: str) -> Any:
        if given.get(name) is None:
            raise ConfigError(
                "SOURCE",
                where,
                f"its arguments lack {name}",
                "Put the model's Hugging Face config.json into its folder",
            )
        return given[name]

    all_biases = bool(given.get("add_bias_linear"))
    qkv_bias = all_biases or bool(given.get("add_qkv_bias"))
    heads = needed("num_attention_heads")
    grouped = given.get("group_query_attention")
    hf: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": given.get("vocab_size") or needed("padded_vocab_size"),
        "hidden_size": needed("hidden_size"),
        "intermediate_size": needed("ffn_hidden_size"),
        "num_hidden_layers": needed("num_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": needed("num_query_groups") if grouped else heads,
        "head_dim": given.get("kv_channels") or needed("hidden_size") // heads,
        "max_position_embeddings": needed("max_position_embeddings"),
        "rms_norm_eps": needed("norm_epsilon"),
        "rope_theta": float(needed("rotary_base")),
        "tie_word_embeddings": not needed("untie_embeddings_and_output_weights"),
        "initializer_range": given.get("init_method_std", 0.02),
    }
    if given.get("attention_dropout"):
        hf["attention_dropout"] = given["attention_dropout"]
    hf |= _scaling(given)
    if given.get("qk_layernorm"):
        if qkv_bias:
            raise ConfigError(
                "SOURCE",
                where,
                "it has biases beside norms of queries and keys, which no supported family has",
                "Give one without the biases",
            )
        return {**hf, "model_type": "qwen3"}
    if qkv_bias and not all_biases:
        return {**hf, "model_type": "qwen2"}
    return {**hf, "attention_bias": all_biases, "mlp_bias": all_biases}


def _scaling(given: dict[str, Any]) -> dict[str, Any]:
    if given.get("use_rope_scaling"):
        scaling = {
            "rope_type": "llama3",
            "factor": given.get("rope_scaling_factor", 8.0),
            "low_freq_factor": _LLAMA3["low_frequency"],
            "high_freq_factor": _LLAMA3["high_frequency"],
            "original_max_position_embeddings": _LLAMA3["original_context"],
        }
        return {"rope_scaling": scaling}
    factor = given.get("rotary_seq_len_interpolation_factor")
    return {"rope_scaling": {"rope_type": "linear", "factor": factor}} if factor else {}
