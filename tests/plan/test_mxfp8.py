"""Plans of runs in MXFP8 against the runs: collectives, bytes at rest, the peak."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.config import Config
from shoal.plan import Plan, make_plan
from shoal.plan.measure import measured_rates
from shoal.plan.sheets import time_sheet
from tests.plan.configs import EXPERTS, config
from tests.plan.measured import Measured, assert_as_planned, measure
from tests.ranks import RankPool

MODEL = {
    **EXPERTS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_hidden_layers": 4,
    "mlp_only_layers": [1, 2],
    "head_dim": 32,
    "max_position_embeddings": 512,
}
R, O, P = "replicate", "optimizer", "parameters"  # noqa: E741
CELLS: dict[str, tuple[int, dict[str, dict[str, Any]]]] = {
    "alone": (1, {}),
    "alone, some kept": (1, {"precision": {"keep_bf16": ["*.self_attn", "*.0.mlp"]}}),
    "parameters": (2, {}),
    "computed again": (2, {"train": {"recompute": "layer"}}),
    "optimizer": (2, {"sharding": {"dense": {"inner": O}, "expert": {"inner": O}}}),
    "in bf16": (2, {"precision": {"parameter_gather": "bf16"}}),
    "Muon": (2, {"optimizer": {"kind": "muon"}}),
    "moments in 8 bits": (2, {"precision": {"moments": "8bit"}}),
    "shared experts": (2, {"parallel": {"expert": 2}}),
    "ring": (2, {"parallel": {"context": 2, "context_exchange": "ring"}}),
    "stages": (2, {"parallel": {"pipeline": 2}, "train": {"recompute": "layer"}}),
    "HFSDP, shared experts": (
        4,
        {
            "cluster": {"nvlink_domain": 2},
            "parallel": {"expert": 2},
            "sharding": {"dense": {"outer": O, "inner": P}, "expert": {"outer": O, "inner": O}},
        },
    ),
    "all parameters": (
        4,
        {
            "cluster": {"nvlink_domain": 2},
            "sharding": {"dense": {"outer": P, "inner": P}, "expert": {"outer": R, "inner": P}},
            "train": {"recompute": "layer"},
            "precision": {"main_weights": "bf16"},
        },
    ),
}


def _settings(name: str, **more: dict[str, Any]) -> Config:
    workers, sections = CELLS[name]
    parallel = sections.get("parallel", {})
    replicas = workers // parallel.get("context", 1) // parallel.get("pipeline", 1)
    base: dict[str, dict[str, Any]] = {
        "model": {"config": MODEL},
        "cluster": {"workers": workers},
        "precision": {"compute": "mxfp8"},
        "train": {"steps": 2, "global_batch": 3 * replicas},
    }
    for given in (sections, more):
        for section, values in given.items():
            base[section] = {**base.get(section, {}), **values}
    return config(**base)


@pytest.mark.parametrize("name", CELLS)
def test_collectives_and_bytes_at_rest(ranks: RankPool, name: str) -> None:
    settings = _settings(name)
    by_rank = ranks.run(settings.cluster.workers, measure, settings)
    assert_as_planned(settings, by_rank)


def _weights(plan: Plan) -> int:
    """Bytes of gathered weights."""
    return sum(
        traffic.payload_bytes
        for traffic in plan.traffic
        if traffic.stream.what == "weights" and traffic.stream.operation == "all_gather"
    )


def test_gathers_take_little_more_than_half() -> None:
    wide = {"hidden_size": 1024, "intermediate_size": 3072, "moe_intermediate_size": 512}
    sections = {"model": {"config": {**MODEL, **wide}}}
    quantized, plain = (make_plan(_settings(n, **sections)) for n in ("parameters", "in bf16"))
    assert 0.5 < _weights(quantized) / _weights(plain) < 0.55
    again = make_plan(_settings("computed again", **sections))
    assert 0.75 < _weights(again) / _weights(plain) < 0.8


def test_estimates_say_what_they_leave_out() -> None:
    for compute in ("mxfp8", "bf16"):
        settings = _settings("parameters", precision={"compute": compute})
        note = time_sheet(make_plan(settings, rates=measured_rates(settings))).note
        assert ("emulation takes several times as long" in note) == (compute == "mxfp8")


def _trace(settings: Config) -> Measured:
    return measure(settings, trace=True)


@pytest.mark.parametrize("name", ["alone", "computed again", "shared experts", "stages"])
def test_the_peak_is_what_the_allocator_saw(ranks: RankPool, name: str) -> None:
    sections: dict[str, dict[str, Any]] = {"data": {"seq_len": 200}}
    if name == "stages":
        sections["train"] = {"recompute": "none"}
    settings = _settings(name, **sections)
    plan = make_plan(settings)
    traced = ranks.run(settings.cluster.workers, _trace, settings)
    for stage in range(plan.topology.pipeline):
        members = range(stage * plan.topology.stage, (stage + 1) * plan.topology.stage)
        mean = sum(traced[rank].peak_bytes for rank in members) / len(members)
        planned = sum(plan.memory[rank].peak for rank in members) / len(members)
        assert planned == pytest.approx(mean, rel=0.1), f"stage {stage}: {planned / mean:.3f}"
