"""The formulas of activations against what autograd really keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from shoal.fsdp import communicator_for
from shoal.models import Decoder, DecoderConfig, Part
from shoal.models.experts import Experts
from shoal.ops.cross_entropy import CHUNK_BYTES
from shoal.parallel.expert import ExpertExchange
from shoal.plan.activations import Kernels, head_bytes, kept_bytes, layer_bytes
from tests.parallel.matrix import MODELS as MATRIX
from tests.plan.configs import DENSE, EXPERTS
from tests.plan.measured import bytes_kept
from tests.ranks import RankPool

B, S = 2, 48
MODELS: dict[str, dict[str, Any]] = {
    "llama": DENSE,
    "grouped queries": {
        **DENSE,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 22,
    },
    "olmoe": {
        "model_type": "olmoe",
        "vocab_size": 257,
        "hidden_size": 64,
        "intermediate_size": 40,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    },
    "qwen3_moe": EXPERTS,
    "qwen2_moe": {
        **{key: value for key, value in EXPERTS.items() if key != "mlp_only_layers"},
        "model_type": "qwen2_moe",
        "shared_expert_intermediate_size": 28,
        "num_hidden_layers": 2,
    },
    "dots1": {**MATRIX["biased"], "num_hidden_layers": 3},
}


def _whole(config: DecoderConfig) -> Part:
    return Part(layers=range(config.num_layers))


def _kept_bytes(
    hf: dict[str, Any],
    dtype: torch.dtype,
    recompute: bool = False,
    exchange: ExpertExchange | None = None,
) -> int:
    """Bytes of the storages that autograd holds after the trunk's forward, weights excluded."""
    decoder = Decoder(DecoderConfig.from_hf(hf), dtype, recompute="layer" if recompute else "none")
    for module in decoder.modules():
        if isinstance(module, Experts) and exchange is not None:
            module.keep_part(exchange)
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    tokens = torch.randint(0, 257, (B, S))
    return bytes_kept(lambda: decoder._hidden(tokens, None, None), decoder.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_the_formula_is_what_autograd_keeps(name: str, dtype: torch.dtype) -> None:
    config = DecoderConfig.from_hf(MODELS[name])
    kernels = Kernels(element_bytes=dtype.itemsize, fused_norm=False)
    expected = kept_bytes(config, _whole(config), kernels, B * S, recompute=False)
    assert _kept_bytes(MODELS[name], dtype) == pytest.approx(expected, rel=0.03)


def _kept_with_shared_experts(hf: dict[str, Any], dtype: torch.dtype) -> int:
    group = dist.group.WORLD
    assert group is not None
    communicator = communicator_for(group, torch.device("cpu"))
    torch.manual_seed(group.rank())
    return _kept_bytes(hf, dtype, exchange=ExpertExchange(hf["num_experts"], communicator))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_shared_experts_keep_what_the_formula_says_on_average(
    ranks: RankPool, dtype: torch.dtype
) -> None:
    hf = {**EXPERTS, "num_experts": 8}
    config = DecoderConfig.from_hf(hf)
    kernels = Kernels(element_bytes=dtype.itemsize, fused_norm=False, shared_experts=True)
    expected = kept_bytes(config, _whole(config), kernels, B * S, recompute=False)
    kept = ranks.run(2, _kept_with_shared_experts, hf, dtype)
    assert sum(kept) / 2 == pytest.approx(expected, rel=0.01)
    assert kept[0] != kept[1], "the routing is even, so this shows nothing"


def test_recomputed_layers_keep_their_inputs() -> None:
    config = DecoderConfig.from_hf({**DENSE, "num_hidden_layers": 8})
    kernels = Kernels(element_bytes=4, fused_norm=False)
    expected = kept_bytes(config, _whole(config), kernels, B * S, recompute=True)
    kept = _kept_bytes({**DENSE, "num_hidden_layers": 8}, torch.float32, recompute=True)
    assert kept == pytest.approx(expected, rel=0.03)
    assert kept < kept_bytes(config, _whole(config), kernels, B * S, recompute=False) / 4


def test_fused_norms_keep_less() -> None:
    config = DecoderConfig.from_hf(DENSE)
    plain = Kernels(element_bytes=2, fused_norm=False)
    fused = Kernels(element_bytes=2, fused_norm=True)
    saved = layer_bytes(config, 0, plain, 10) - layer_bytes(config, 0, fused, 10)
    assert saved == 10 * 2 * 6 * config.hidden_size


def test_the_head_takes_a_chunk_of_logits_at_a_time() -> None:
    config = DecoderConfig.from_hf({**DENSE, "vocab_size": 2**20})
    rows = CHUNK_BYTES // (4 * 2**20)
    assert rows < 100
    for tokens in (100, 3):
        ahead = 2 * 2 * tokens * 66 + 4 * 2**20 * 66
        assert head_bytes(config, 2, tokens) == min(rows, tokens) * 2**20 * 8 + ahead
