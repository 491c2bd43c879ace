"""Plans of context parallelism against what real ranks send each other, and its memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from shoal.config import Config
from shoal.models import Decoder, DecoderConfig
from shoal.parallel.context import ContextParallel
from shoal.plan import make_plan, read_decoder_config
from shoal.plan.activations import Kernels, layer_bytes
from shoal.plan.context import ContextPlan
from tests.plan.configs import DENSE, EXPERTS, config
from tests.plan.measured import Measured, assert_as_planned, bytes_kept, measure
from tests.ranks import RankPool

GROUPED = {**DENSE, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 22}


def steps(all_settings: list[Config]) -> list[Measured]:
    return [measure(settings) for settings in all_settings]


def settings_of(world_size: int, context: int, exchange: str, **sections: Any) -> Config:
    base: dict[str, Any] = {
        "model": {"config": {**EXPERTS, "num_key_value_heads": 1}},
        "data": {"seq_len": 17},
        "cluster": {"workers": world_size, "device": "cpu", "nvlink_domain": context},
        "parallel": {"context": context, "context_exchange": exchange},
        "train": {"steps": 1, "micro_batch": 2, "global_batch": 6 * world_size // context},
        "sharding": {"dense": {"outer": "optimizer", "inner": "parameters"}},
    }
    for name, section in sections.items():
        base[name] = {**base.get(name, {}), **section}
    return config(**base)


@pytest.mark.parametrize("exchange", ["gather", "ring"])
@pytest.mark.parametrize(("world_size", "context"), [(2, 2), (4, 2), (4, 4)])
def test_every_collective_of_a_step_is_planned(
    ranks: RankPool, world_size: int, context: int, exchange: str
) -> None:
    cells = [
        settings_of(world_size, context, exchange, precision={"compute": "bf16"}),
        settings_of(world_size, context, exchange, model={"config": GROUPED}),
    ]
    by_rank = ranks.run(world_size, steps, cells)
    for index, settings in enumerate(cells):
        assert_as_planned(settings, [results[index] for results in by_rank])


def kept_bytes(settings: Config) -> int:
    """Bytes that autograd holds after the layers' forward, weights excluded."""
    plan = make_plan(settings)
    context = ContextParallel.over(
        plan.topology, torch.device("cpu"), settings.parallel.context_exchange
    )
    model = Decoder(read_decoder_config(settings.model), plan.precision.compute, context=context)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    tokens = torch.randint(0, 257, (plan.batches.micro_batch, plan.batches.seq_len))
    num_bytes = bytes_kept(lambda: model._hidden(tokens, None, None), model.parameters())
    dist.barrier()
    return num_bytes


@pytest.mark.parametrize("exchange", ["gather", "ring"])
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_activations_are_divided(ranks: RankPool, compute: str, exchange: str) -> None:
    settings = settings_of(
        2,
        2,
        exchange,
        model={"config": GROUPED},
        data={"seq_len": 64},
        precision={"compute": compute},
    )
    decoder = DecoderConfig.from_hf(GROUPED)
    kernels = Kernels(element_bytes=4 if compute == "fp32" else 2, fused_norm=False)
    num_tokens = 2 * 32
    expected = sum(layer_bytes(decoder, i, kernels, num_tokens) for i in range(decoder.num_layers))
    expected += num_tokens * kernels.norm(decoder.hidden_size)
    for kept in ranks.run(2, kept_bytes, settings):
        assert kept == pytest.approx(expected, rel=0.03)


def exchange_bytes(context: int, exchange: str) -> int:
    settings = settings_of(context, context, exchange, data={"seq_len": 64})
    plan = make_plan(settings)
    return ContextPlan(
        config=settings,
        decoder=read_decoder_config(settings.model),
        topology=plan.topology,
        batches=plan.batches,
        compute=torch.float32,
        stage=0,
        parts=(),
    ).exchange_bytes


def test_a_rank_plans_with_its_tokens_and_the_keys_of_others() -> None:
    # A share: keys and values of 2 x 16 tokens, one head of 16, in fp32.
    share = 4 * 2 * 2 * 16 * 16
    assert exchange_bytes(1, "gather") == 0
    assert exchange_bytes(4, "gather") == 4 * 4 * share
    assert exchange_bytes(4, "ring") == 5 * share
