"""Times of a step by the stated rates, against what can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
import torch

from shoal.config import Config
from shoal.errors import ConfigError
from shoal.models import DecoderConfig, Part, parameter_shapes
from shoal.plan import GPUS, Machine, Plan, Rates, StepTime, gpu_rates, make_plan
from shoal.plan.rates import Link
from shoal.plan.target import machine_and_rates
from shoal.plan.work import part_work
from tests.plan.configs import DENSE, EXPERTS, config

FREE = Link(bytes_per_s=1e30, latency_s=0.0)
RATES = Rates(
    name="ideal",
    flops=MappingProxyType({torch.bfloat16: 1e9, torch.float32: 1e8}),
    memory_bytes_per_s=1e30,
    inside=FREE,
    outside=FREE,
    domain=None,
    memory_bytes=None,
    source="made up",
)
MATRICES = {
    **DENSE,
    "tie_word_embeddings": False,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


def _time(rates: Rates = RATES, **sections: dict[str, Any]) -> StepTime:
    time = _plan(rates, **sections).time
    assert time is not None
    return time


def _plan(rates: Rates = RATES, **sections: dict[str, Any]) -> Plan:
    base: dict[str, dict[str, Any]] = {
        "model": {"config": MATRICES},
        "cluster": {"device": "cuda"},
        "precision": {"compute": "bf16"},
    }
    settings = config(
        **{key: {**base.get(key, {}), **sections.get(key, {})} for key in base | sections}
    )
    return make_plan(settings, Machine.with_gpus(), rates=rates)


def test_matrix_products_are_six_operations_a_parameter_and_token() -> None:
    decoder = DecoderConfig.from_hf(MATRICES)
    work = part_work(decoder, Part(layers=range(2)), 16, recompute=False)
    matrices = {
        name: shape.numel()
        for name, shape in parameter_shapes(decoder).items()
        if len(shape) == 2 and "embed" not in name
    }
    assert work.dense + work.head == 6 * sum(matrices.values())
    # Of 16 tokens the first sees one key, the last all: 8.5 in the mean, in two products.
    assert work.attention == 6 * 2 * 2 * 64 * 8.5
    again = part_work(decoder, Part(layers=range(2)), 16, recompute=True)
    assert again.useful == work.useful
    assert 3 * (again.again + again.attention_again) == work.dense + work.attention


def test_a_sliding_window_and_experts_are_what_a_token_visits() -> None:
    window = DecoderConfig.from_hf({**MATRICES, "model_type": "mistral", "sliding_window": 4})
    work = part_work(window, Part(layers=range(2)), 16, recompute=False)
    assert work.attention == 6 * 2 * 2 * 64 * (1 + 2 + 3 + 13 * 4) / 16
    experts = DecoderConfig.from_hf(EXPERTS)
    work = part_work(experts, Part(layers=range(3)), 16, recompute=False)
    assert work.experts == 2 * 6 * 2 * 3 * 32 * 20  # two sparse layers, two experts a token


def test_a_step_is_its_parts_and_computing_is_work_by_rate() -> None:
    time = _time(train={"global_batch": 4, "micro_batch": 2})
    decoder = DecoderConfig.from_hf(MATRICES)
    work = part_work(decoder, Part(layers=range(2)), 16, recompute=False)
    assert time.compute_s == pytest.approx(work.useful * 64 / 1e9)
    assert time.total_s == pytest.approx(time.compute_s, rel=1e-6)
    assert time.flops_share == pytest.approx(1, rel=1e-6)
    assert time.tokens_per_s == pytest.approx(64 / time.total_s)
    again = _time(train={"global_batch": 4, "micro_batch": 2, "recompute": "layer"})
    assert again.total_s == pytest.approx(time.total_s + again.again_s)
    assert time.total_s == sum(time.parts.values())


def test_ranks_divide_the_work_and_stages_wait_for_each_other() -> None:
    alone = _time(train={"global_batch": 8})
    four = _time(train={"global_batch": 8}, cluster={"device": "cuda", "workers": 4})
    assert four.compute_s == pytest.approx(alone.compute_s / 4)
    staged = _time(
        train={"global_batch": 8},
        cluster={"device": "cuda", "workers": 2},
        parallel={"pipeline": 2},
    )
    assert staged.stage == 1, "the head makes the last stage the longest"
    assert staged.bubble_s == pytest.approx(staged.compute_s / 8)  # one of eight, and one more


def test_weights_hide_behind_computing_until_there_are_too_many() -> None:
    sections: dict[str, dict[str, Any]] = {
        "cluster": {"device": "cuda", "workers": 4, "nvlink_domain": 2},
        "sharding": {"dense": {"outer": "parameters", "inner": "parameters"}},
    }
    plan = _plan(RATES, **sections)
    assert plan.time is not None
    assert plan.time.weights_s == plan.time.gradients_s == 0
    (sent,) = plan.sent
    slow = Link(bytes_per_s=sent["outside"] / (3 * plan.time.compute_s), latency_s=0.0)
    time = _time(replace(RATES, outside=slow), **sections)
    assert time.weights_s + time.gradients_s == pytest.approx(2 * plan.time.compute_s, rel=1e-3)
    assert time.total_s == pytest.approx(3 * plan.time.compute_s, rel=1e-3)
    # What travels once a step hides behind one forward only.
    once = {"dense": {"outer": "optimizer", "inner": "optimizer"}}
    refreshed = _time(replace(RATES, outside=slow), **{**sections, "sharding": once})
    assert 0 < refreshed.weights_s < time.weights_s


def test_tokens_on_their_way_are_waited_for() -> None:
    sections: dict[str, dict[str, Any]] = {
        "model": {"config": {**EXPERTS, "num_experts": 8}},
        "cluster": {"device": "cuda", "workers": 2},
        "parallel": {"expert": 2},
    }
    slow = replace(RATES, inside=Link(bytes_per_s=1e9, latency_s=0.0))
    plan = _plan(slow, **sections)
    assert plan.time is not None
    sent = sum(one.sent_bytes for one in plan.traffic if one.stream.axis == "expert")
    assert plan.time.exchange_s == pytest.approx(sent / 1e9)
    assert _time(RATES, **sections).exchange_s == pytest.approx(0, abs=1e-9)


def test_shared_sequences_take_attention_in_fp32_on_gpus() -> None:
    alone = _time(train={"global_batch": 2})
    shared = _time(
        train={"global_batch": 2},
        cluster={"device": "cuda", "workers": 2},
        parallel={"context": 2},
    )
    assert shared.attention_s == pytest.approx(10 * alone.attention_s / 2)
    assert shared.dense_s == pytest.approx(alone.dense_s / 2)


def test_links_by_where_groups_lie() -> None:
    plan = _plan(
        model={"config": {**MATRICES, "num_hidden_layers": 4}},
        cluster={"device": "cuda", "workers": 8, "nvlink_domain": 4},
        parallel={"pipeline": 4},
        train={"global_batch": 8},
    )
    by_stage = [
        {row["what"]: row["link"] for row in plan.as_dict()["collectives"] if row["stage"] == stage}
        for stage in range(4)
    ]
    # Two stages of two ranks share a domain; messages leave it between the second and the third.
    assert by_stage[0]["activations"] == by_stage[3]["gradients of activations"] == "inside"
    assert by_stage[1]["activations"] == by_stage[2]["gradients of activations"] == "outside"
    assert by_stage[1]["gradients of activations"] == by_stage[2]["activations"] == "inside"
    assert plan.sent[0]["outside"] == 0 < plan.sent[1]["outside"]


@pytest.mark.parametrize("kind", GPUS)
def test_known_gpus(kind: str) -> None:
    rates = gpu_rates(kind.lower())
    assert rates.name == kind and kind in rates.source
    assert rates.flops[torch.bfloat16] > rates.flops[torch.float32] > 1e13
    assert rates.inside.bytes_per_s > rates.outside.bytes_per_s > 1e10
    assert rates.memory_bytes is not None and rates.memory_bytes > 7e10
    seconds = rates.inside.seconds(10**9, 2, 8)
    assert seconds == pytest.approx(1e9 / rates.inside.bytes_per_s + 2 * 3 * 5e-6)


def test_unknown_gpus_and_domains_that_none_have_are_refused() -> None:
    with pytest.raises(ConfigError, match="Use one of A100, H100, H200, B200, GB200"):
        gpu_rates("V100")
    with pytest.raises(ConfigError, match=r"cluster\.nvlink_domain = None: 16 ranks would share"):
        _plan(gpu_rates("H100"), cluster={"device": "cuda", "workers": 16})


def _cpu() -> Config:
    return config(cluster={"device": "cpu", "workers": 2})


def test_rates_of_cpus_are_measured() -> None:
    machine, rates = machine_and_rates(_cpu(), gpu=None, measure=True)
    assert rates is not None and rates.domain is None
    assert rates.flops[torch.float32] > 1e8 and rates.inside.bytes_per_s > 1e7
    time = make_plan(_cpu(), machine, rates=rates).time
    assert time is not None and time.total_s > 0
    assert machine_and_rates(_cpu(), gpu=None, measure=False)[1] is None


def test_a_kind_of_gpu_and_cpus_exclude_each_other() -> None:
    for measure in (False, True):
        with pytest.raises(ConfigError, match="--gpu = 'H100'"):
            machine_and_rates(_cpu(), gpu="H100", measure=measure)
