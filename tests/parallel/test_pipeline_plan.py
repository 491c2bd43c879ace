"""What a plan says of a pipeline in bf16 against what its ranks do, and how its stages differ."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.config import Config
from shoal.plan import Kind, make_plan
from tests.plan.measured import Measured, assert_as_planned, measure
from tests.ranks import RankPool
from tests.training.tiny import MIXTURE, MODEL, make_config, write_text


def _measure_each(configs: list[Config]) -> list[Measured]:
    return [measure(config) for config in configs]


@pytest.mark.parametrize("workers", [2, 4])
def test_bytes_and_traffic_are_as_planned(tmp_path: Path, ranks: RankPool, workers: int) -> None:
    write_text(tmp_path / "text.txt")
    configs = [
        make_config(
            tmp_path,
            model={
                "config": {**model, "num_hidden_layers": 5, "tie_word_embeddings": tied},
            },
            data={"seq_len": 17},
            cluster={"workers": workers},
            parallel={"pipeline": 2, "virtual_stages": virtual},
            sharding={"dense": {"inner": inner}, "expert": {"inner": inner}},
            precision={"compute": "bf16"},
            train={"global_batch": 3 * workers // 2},
        )
        for model, tied, virtual, inner in (
            (MODEL, True, 1, "parameters"),
            (MODEL, True, 2, "optimizer"),
            (MIXTURE, False, 1, "gradients"),
            (MIXTURE, True, 2, "parameters"),
        )
    ]
    by_rank = ranks.run(workers, _measure_each, configs)
    for index, config in enumerate(configs):
        assert_as_planned(config, [results[index] for results in by_rank])


def test_stages_differ_and_the_plan_says_how(tmp_path: Path) -> None:
    write_text(tmp_path / "text.txt")
    config = make_config(
        tmp_path,
        model={"config": {**MODEL, "num_hidden_layers": 5, "tie_word_embeddings": True}},
        cluster={"workers": 2},
        parallel={"pipeline": 2},
        train={"global_batch": 4},
    )
    plan = make_plan(config)
    assert plan.layers == ((range(0, 3),), (range(3, 5),))
    assert plan.bubble_share == pytest.approx(1 / 5)  # one of four microbatches and one stage more
    first, last = (memory.num_bytes for memory in plan.memory)
    assert first[Kind.MAIN_WEIGHTS] > last[Kind.MAIN_WEIGHTS] > plan.num_parameters
    assert first[Kind.ACTIVATIONS] > 2 * last[Kind.ACTIVATIONS] * 0.9, "two microbatches wait there"
