"""The peak that a plan tells against what the allocator gave out in a step."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.config import Config
from shoal.plan import make_plan
from tests.plan.configs import DENSE, EXPERTS, config
from tests.plan.measured import Measured, measure
from tests.ranks import RankPool

WIDE = {
    **DENSE,
    "vocab_size": 1031,
    "hidden_size": 66,
    "intermediate_size": 190,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 22,
    "max_position_embeddings": 512,
}
MIXTURE = {
    **EXPERTS,
    "vocab_size": 1031,
    "hidden_size": 64,
    "moe_intermediate_size": 50,
    "num_experts": 8,
    "num_hidden_layers": 4,
    "max_position_embeddings": 512,
}
NARROW = {**MIXTURE, "vocab_size": 257}
"""Its layers take more than its head."""
SHARED = {
    **{key: value for key, value in NARROW.items() if key != "head_dim"},
    "model_type": "qwen2_moe",
    "shared_expert_intermediate_size": 90,
}
BF16 = {"compute": "bf16"}
AGAIN = {"recompute": "layer"}
LEVELS = {"outer": "optimizer", "inner": "parameters"}
CELLS: dict[str, tuple[int, dict[str, Any], dict[str, dict[str, Any]]]] = {
    "dense": (1, WIDE, {}),
    "dense in bf16": (1, WIDE, {"precision": BF16, "train": {"global_batch": 3}}),
    "computed again": (1, WIDE, {"train": AGAIN}),
    "few tokens": (1, WIDE, {"data": {"seq_len": 9}, "precision": {"moments": "bf16"}}),
    "mixture": (1, MIXTURE, {}),
    "mixture in bf16": (1, MIXTURE, {"precision": BF16, "train": AGAIN}),
    "mixture computed again": (1, NARROW, {"train": AGAIN}),
    "shared expert": (1, SHARED, {}),
    "parameters": (2, WIDE, {"sharding": {"dense": {"inner": "parameters"}}}),
    "optimizer": (
        2,
        WIDE,
        {"sharding": {"dense": {"inner": "optimizer"}}, "train": {"global_batch": 6}},
    ),
    "gathered keys": (2, WIDE, {"parallel": {"context": 2}, "data": {"seq_len": 301}}),
    "ring": (2, WIDE, {"parallel": {"context": 2, "context_exchange": "ring"}}),
    "experts": (2, MIXTURE, {"parallel": {"expert": 2}}),
    "experts in bf16": (2, MIXTURE, {"parallel": {"expert": 2}, "precision": BF16}),
    "stages": (2, WIDE, {"parallel": {"pipeline": 2}, "train": {"global_batch": 5}}),
    "experts in bf16, computed again": (
        2,
        NARROW,
        {"parallel": {"expert": 2}, "precision": BF16, "train": AGAIN},
    ),
    "stages in bf16": (
        2,
        MIXTURE,
        {"parallel": {"pipeline": 2}, "train": {"global_batch": 4}, "precision": BF16},
    ),
    "stages in bf16, computed again": (
        2,
        NARROW,
        {
            "parallel": {"pipeline": 2},
            "train": {"global_batch": 4, **AGAIN},
            "precision": BF16,
        },
    ),
    "virtual stages": (
        2,
        WIDE,
        {"parallel": {"pipeline": 2, "virtual_stages": 2}, "train": {"global_batch": 6}},
    ),
}


def _settings(name: str) -> Config:
    workers, model, sections = CELLS[name]
    base: dict[str, dict[str, Any]] = {
        "model": {"config": model},
        "cluster": {"workers": workers},
        "data": {"seq_len": 200},
        "train": {"steps": 2, "global_batch": workers},
    }
    if "parallel" in sections:
        degree = max(sections["parallel"].get(key, 1) for key in ("context", "pipeline"))
        base["train"]["global_batch"] = workers // degree
    for section, values in sections.items():
        base[section] = {**base.get(section, {}), **values}
    return config(**base)


def _trace(settings: Config) -> Measured:
    return measure(settings, trace=True)


@pytest.mark.parametrize("name", CELLS)
def test_the_peak_is_what_the_allocator_saw(ranks: RankPool, name: str) -> None:
    settings = _settings(name)
    plan = make_plan(settings)
    traced = ranks.run(settings.cluster.workers, _trace, settings)
    for rank, step in enumerate(traced):
        assert plan.memory[rank].at_rest == pytest.approx(sum(step.at_rest.values()), rel=0.01)
    for stage in range(plan.topology.pipeline):
        # Which experts tokens visit makes ranks differ: even routing is planned.
        ranks_of = range(stage * plan.topology.stage, (stage + 1) * plan.topology.stage)
        mean = sum(traced[rank].peak_bytes for rank in ranks_of) / len(ranks_of)
        planned = sum(plan.memory[rank].peak for rank in ranks_of) / len(ranks_of)
        assert planned == pytest.approx(mean, rel=0.1), f"stage {stage}: {planned / mean:.3f}"
