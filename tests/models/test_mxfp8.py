"""Which matrices multiply in MXFP8, and that they do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal import ops
from shoal.errors import ConfigError
from shoal.models import Bf16Choice, Decoder, DecoderConfig, choose_mxfp8, initialize, split_decoder
from shoal.models.experts import Experts
from shoal.models.linear import Linear
from shoal.models.mxfp8 import check_quantized_gather, matrices
from tests.models.tiny import TINY

DENSE = DecoderConfig.from_hf(TINY["llama2"])
SHARED = DecoderConfig.from_hf(TINY["qwen2_moe"])


def matrix_names(config: DecoderConfig) -> list[str]:
    return [matrix.name for matrix in matrices(config)]


def meta(config: DecoderConfig, **options: Any) -> Decoder:
    with torch.device("meta"):
        return Decoder(config, torch.bfloat16, **options)


@pytest.mark.parametrize("family", sorted(TINY))
def test_linear_and_expert_layers_are_named(family: str) -> None:
    config = DecoderConfig.from_hf(TINY[family])
    decoder = meta(config)
    expected = []
    for path, module in decoder.named_modules():
        if isinstance(module, Experts):
            expected += [f"{path}.gate_up_proj", f"{path}.down_proj"]
        elif isinstance(module, Linear) and not path.endswith(("lm_head", "shared_expert_gate")):
            expected.append(f"{path}.weight")
    assert sorted(matrix_names(config)) == sorted(expected)
    for matrix in matrices(config):
        count = config.experts.num_experts if ".experts." in matrix.name and config.experts else 1
        shape = decoder.get_parameter(matrix.name).shape
        assert shape == (count * matrix.rows, matrix.columns)
    assert choose_mxfp8(config, Bf16Choice()) == frozenset(expected)


@pytest.mark.parametrize(
    ("bf16", "kept"),
    [
        (Bf16Choice(at_start=1), ["model.layers.0."]),
        (Bf16Choice(at_end=2), ["model.layers.1.", "model.layers.2."]),
        (Bf16Choice(patterns=("model.layers.0",)), ["model.layers.0."]),
        (Bf16Choice(patterns=("*.self_attn", "*.down_proj")), ["self_attn", "down_proj"]),
        (Bf16Choice(patterns=("model.layers.?.mlp.*",)), [".mlp."]),
    ],
    ids=str,
)
def test_what_is_kept(bf16: Bf16Choice, kept: list[str]) -> None:
    names = set(matrix_names(SHARED))
    chosen = choose_mxfp8(SHARED, bf16)
    assert names - chosen == {name for name in names if any(text in name for text in kept)}


def test_what_cannot_be_kept() -> None:
    with pytest.raises(ConfigError, match=r"keep_bf16 = '\*\.attn': no linear .* has such a name"):
        choose_mxfp8(DENSE, Bf16Choice(patterns=("*.self_attn", "*.attn")))
    with pytest.raises(ConfigError, match=r"keep_bf16 = 'lm_head'"):
        choose_mxfp8(DENSE, Bf16Choice(patterns=("lm_head",)))
    with pytest.raises(ConfigError, match=r"compute = 'mxfp8': all 14 matrices .* kept in bf16"):
        choose_mxfp8(DENSE, Bf16Choice(at_start=1, at_end=1))


def test_what_cannot_travel_in_mxfp8() -> None:
    with pytest.raises(ConfigError, match=r"blocks of 32 rows and columns") as caught:
        check_quantized_gather(SHARED, choose_mxfp8(SHARED, Bf16Choice()), is_asked_for=True)
    assert (caught.value.field, caught.value.value) == ("precision.parameter_gather", "mxfp8")
    # What the remedy lists leaves nothing that cannot.
    patterns = caught.value.remedy.partition("keep_bf16 ")[2].split(", ")
    with pytest.raises(ConfigError, match=r"all .* kept in bf16"):
        choose_mxfp8(SHARED, Bf16Choice(patterns=tuple(patterns)))


def test_parts_of_a_decoder_have_theirs() -> None:
    chosen = choose_mxfp8(SHARED, Bf16Choice(patterns=("*.0.self_attn",)))
    found: list[str] = []
    for part in split_decoder(SHARED, 2):
        decoder = meta(SHARED, part=part, mxfp8=chosen)
        found += decoder.mxfp8
    assert sorted(found) == sorted(chosen)
    assert meta(SHARED).mxfp8 == ()


def test_the_chosen_multiply_in_mxfp8() -> None:
    chosen = choose_mxfp8(SHARED, Bf16Choice(at_start=1, patterns=("*.up_proj", "*.q_proj")))
    decoder = Decoder(SHARED, torch.bfloat16, mxfp8=chosen)
    products: dict[str, object] = {}
    for path, module in decoder.named_modules():
        if isinstance(module, Experts):
            products |= {f"{path}.{name}": product for name, product in module.products.items()}
        elif isinstance(module, Linear):
            products[f"{path}.weight"] = module.product
    quantized = (ops.mxfp8_linear, ops.mxfp8_grouped_linear)
    assert {name for name, product in products.items() if product in quantized} == chosen
    losses = []
    for model in (decoder, Decoder(SHARED, torch.bfloat16)):
        initialize(model, 0)
        tokens = torch.arange(14).view(2, 7)
        loss = model(tokens, labels=tokens).loss_sum
        assert loss is not None
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    assert losses[0] != losses[1]
