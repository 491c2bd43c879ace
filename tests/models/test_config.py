"""Reading Hugging Face configs: the same meaning as ``transformers``, and refusals by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal.errors import ConfigError
from shoal.models import DecoderConfig
from shoal.models.families import FAMILIES
from shoal.models.rotary import rotary_frequencies
from tests.models.tiny import TINY


def theirs(hf: dict[str, Any]) -> Any:
    import transformers

    values = {key: value for key, value in hf.items() if key != "model_type"}
    return transformers.AutoConfig.for_model(hf["model_type"], **values)


NEEDED = {"dots1": {"n_routed_experts": 16, "n_shared_experts": 2, "num_experts_per_tok": 4}}
"""What has no default there either."""


@pytest.mark.parametrize("family", FAMILIES)
def test_silent_configs_mean_what_they_mean_to_transformers(family: str) -> None:
    hf = {"model_type": family, **NEEDED.get(family, {})}
    ours, other = DecoderConfig.from_hf(hf), theirs(hf)
    assert ours.vocab_size == other.vocab_size
    assert ours.hidden_size == other.hidden_size
    assert ours.intermediate_size == other.intermediate_size
    assert ours.num_layers == other.num_hidden_layers
    assert ours.num_heads == other.num_attention_heads
    assert ours.num_key_value_heads == other.num_key_value_heads
    other_head_dim = getattr(other, "head_dim", None)
    assert ours.head_dim == (other_head_dim or other.hidden_size // other.num_attention_heads)
    assert ours.max_position_embeddings == other.max_position_embeddings
    assert ours.rms_norm_eps == other.rms_norm_eps
    assert ours.initializer_range == other.initializer_range
    assert ours.tie_word_embeddings == other.tie_word_embeddings
    assert ours.rotary.theta == other.rope_parameters["rope_theta"]
    assert FAMILIES[family].architecture.startswith(type(other).__name__.removesuffix("Config"))
    if ours.experts is not None:
        num_experts = hf.get("n_routed_experts") or other.num_experts
        assert ours.experts.num_experts == num_experts
        assert ours.experts.experts_per_token == other.num_experts_per_tok
        coefficient = getattr(other, "router_aux_loss_coef", 0.0)
        assert ours.experts.balance_coefficient == coefficient


def test_every_family_has_a_tiny_config() -> None:
    assert {hf["model_type"] for hf in TINY.values()} == set(FAMILIES)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"model_type": "gpt2"}, "model.config.model_type"),
        ({"model_type": None}, "model.config.model_type"),
        ({"hiden_size": 66}, "model.config.hiden_size"),
        ({"num_atention_heads": 3}, "model.config.num_atention_heads"),
        ({"hidden_act": "gelu"}, "model.config.hidden_act"),
        ({"hidden_size": "66"}, "model.config.hidden_size"),
        ({"hidden_size": True}, "model.config.hidden_size"),
        ({"rope_scaling": "linear"}, "model.config.rope_scaling"),
        ({"rope_parameters": [1]}, "model.config.rope_parameters"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, "model.config.rope_parameters.rope_type"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": "x"}},
            "model.config.rope_parameters.beta_fast",
        ),
        (
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 2.0,
                    "original_max_position_embeddings": "x",
                }
            },
            "model.config.rope_parameters.original_max_position_embeddings",
        ),
        ({"num_hidden_layers": 0}, "model.config.num_hidden_layers"),
        ({"num_key_value_heads": 2}, "model.config.num_key_value_heads"),
        ({"head_dim": 21}, "model.config.head_dim"),
        ({"hidden_size": 67}, "model.config.hidden_size"),
        ({"attention_dropout": 1.0}, "model.config.attention_dropout"),
        ({"attention_dropout": float("nan")}, "model.config.attention_dropout"),
        ({"rms_norm_eps": -1e-5}, "model.config.rms_norm_eps"),
        ({"attention_bias": "yes"}, "model.config.attention_bias"),
        ({"clip_qkv": 8.0}, "model.config.clip_qkv"),
        ({"quantization_config": {"bits": 4}}, "model.config.quantization_config"),
        ({"rope_interleaved": True}, "model.config.rope_interleaved"),
        ({"partial_rotary_factor": 0.5}, "model.config.partial_rotary_factor"),
        ({"rope_theta": 0}, "model.config.rope_parameters.rope_theta"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "model.config.rope_parameters.rope_type"),
        ({"rope_scaling": {"type": "linear"}}, "model.config.rope_parameters.factor"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4}},
            "model.config.rope_parameters.high_freq_factor",
        ),
        ({"layer_types": ["sliding_attention"] * 2}, "model.config.layer_types"),
        ({"layer_types": ["full_attention"]}, "model.config.layer_types"),
    ],
)
def test_bad_values_are_named(values: dict[str, Any], field: str) -> None:
    hf = {**TINY["llama2"], **values}
    if "hiden_size" in values:
        del hf["hidden_size"]
    if "num_atention_heads" in values:
        del hf["num_attention_heads"]
    with pytest.raises(ConfigError) as refusal:
        DecoderConfig.from_hf(hf)
    assert refusal.value.field == field


@pytest.mark.parametrize(
    ("name", "values", "field"),
    [
        ("mixtral", {"router_jitter_noise": 0.1}, "model.config.router_jitter_noise"),
        ("mixtral", {"num_experts_per_tok": 6}, "model.config.num_experts_per_tok"),
        ("mistral", {"sliding_window": 0}, "model.config.sliding_window"),
        ("mistral", {"attention_bias": True}, "model.config.attention_bias"),
        ("olmoe", {"head_dim": 16}, "model.config.head_dim"),
        ("qwen2", {"layer_types": ["linear_attention"] * 2}, "model.config.layer_types"),
        ("qwen3_moe", {"mlp_only_layers": 1}, "model.config.mlp_only_layers"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "model.config.decoder_sparse_step"),
    ],
)
def test_bad_values_of_a_family_are_named(name: str, values: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        DecoderConfig.from_hf(TINY[name] | values)
    assert refusal.value.field == field


def test_keys_of_other_programs_are_let_be() -> None:
    extra = {"is_llama_config": True, "transformers.js_config": {}, "rope_interleaved": False}
    DecoderConfig.from_hf(TINY["smollm2"] | extra)


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"rope_type": "default", "rope_theta": 3e5},
        {"type": "linear", "factor": 4},
        {"rope_type": "dynamic", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
        {"rope_type": "yarn", "factor": 8.0, "beta_fast": 16, "beta_slow": 2, "truncate": False},
        {"rope_type": "yarn", "factor": 8.0, "mscale": 0.7, "mscale_all_dim": 1.2},
        {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.5},
        {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        },
    ],
)
def test_rotary_frequencies_equal_transformers(scaling: dict[str, Any] | None) -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    hf = TINY["llama2"] | {"max_position_embeddings": 2048, "head_dim": 64, "rope_theta": 1e5}
    hf |= {"rope_scaling": scaling}
    ours = DecoderConfig.from_hf(hf)
    # A copy: their class writes into the dictionary it is given.
    other = LlamaRotaryEmbedding(theirs(hf | {"rope_scaling": scaling and dict(scaling)}))
    frequencies = rotary_frequencies(ours.rotary, 64, torch.device("cpu"))
    torch.testing.assert_close(frequencies, other.inv_freq, rtol=1e-6, atol=0)
    assert ours.rotary.attention_factor == pytest.approx(other.attention_scaling)


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "qwen2_moe"])
@pytest.mark.parametrize("used", [False, True])
def test_windows_equal_transformers(name: str, used: bool) -> None:
    hf = TINY[name] | {"num_hidden_layers": 6, "max_window_layers": 4, "sliding_window": 3}
    hf |= {"use_sliding_window": used, "mlp_only_layers": None}
    expected = [3 if kind == "sliding_attention" else None for kind in theirs(hf).layer_types]
    assert list(DecoderConfig.from_hf(hf).windows) == expected
    typed = hf | {"layer_types": ["full_attention"] * 6}
    assert set(DecoderConfig.from_hf(typed).windows) == {None}


@pytest.mark.parametrize(
    ("values", "remedy"),
    [
        ({"n_group": 2}, "Set it to 1"),
        ({"topk_group": 0}, "Set topk_group"),
        ({"router_aux_loss_coef": 0.1}, "Remove the key"),
        ({"first_k_dense_replace": -1}, "Set first_k_dense_replace"),
        ({"n_shared_experts": None}, "Set n_shared_experts"),
        ({"n_routed_experts": None}, "Set n_routed_experts"),
        ({"num_experts_per_tok": 8}, "Take fewer"),
        ({"routed_scaling_factor": "2"}, "Set routed_scaling_factor"),
    ],
)
def test_experts_chosen_with_a_bias_are_checked(values: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        DecoderConfig.from_hf({**TINY["dots1"], **values})
    (name,) = values
    assert (refusal.value.field, refusal.value.remedy) == (f"model.config.{name}", remedy)
