"""What a plan says of a pipeline against what its ranks do: bytes at rest and all that travels."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shoal.config import Config
from shoal.fsdp import Ledger
from shoal.plan import Kind, make_plan, topology_of
from shoal.topology import MESH_AXES
from shoal.training import Stepper, build_model, build_sharded_optimizer, fill_model
from tests.parallel.test_pipeline_parity import _row, sequences
from tests.plan.measured import bytes_by_kind
from tests.ranks import RankPool
from tests.training.tiny import MIXTURE, MODEL, make_config, write_text

Calls = dict[tuple[str, str], tuple[int, int]]
"""By deed and axis: how many, and bytes of their larger sides."""


def _measure(config: Config) -> tuple[dict[str, int], Calls]:
    """Bytes at rest by kind and what travelled in one step, on one rank."""
    plan, rank = make_plan(config), dist.get_rank()
    topology, ledger = topology_of(config), Ledger()
    passes = build_model(config, plan.precision, torch.device("cpu"), ledger=ledger)
    fill_model(passes.model, config)
    optimizer = build_sharded_optimizer(config, passes.model, plan.precision)
    stepper = Stepper(
        passes, optimizer, settings=config.optimizer, num_steps=1, readers=topology.pipeline
    )
    share = plan.batches.num_microbatches
    first = topology.coordinates(rank).data * share
    batch = sequences(plan.batches.global_batch, 0)
    ledger.clear()
    stepper.step(0, [_row(batch, row) for row in range(first, first + share)])
    calls: Calls = {}
    for collective in ledger.collectives:
        axis = _axis(topology, collective.ranks)
        if collective.deed == "all_reduce" and collective.nbytes == 8:
            continue  # a sum of squares of the gradient's norm
        count, nbytes = calls.get((collective.deed, axis), (0, 0))
        calls[collective.deed, axis] = (count + 1, nbytes + collective.nbytes)
    return bytes_by_kind(passes.model, optimizer), calls


def _axis(topology: Any, ranks: tuple[int, ...]) -> str:
    stages = {topology.coordinates(rank).pipeline for rank in ranks}
    if len(stages) > 1:
        return "pipeline"
    outer = {topology.coordinates(rank).outer for rank in ranks}
    return MESH_AXES[0] if len(outer) > 1 else MESH_AXES[1]


def _measure_each(configs: list[Config]) -> list[tuple[dict[str, int], Calls]]:
    return [_measure(config) for config in configs]


def _planned(config: Config, rank: int) -> tuple[dict[str, int], Calls]:
    plan = make_plan(config)
    stage = plan.topology.coordinates(rank).pipeline
    counts: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for traffic in plan.traffic:
        if traffic.stream.stage == stage:
            key = traffic.stream.deed, traffic.stream.axis
            counts[key] += traffic.count
            sizes[key] += traffic.payload_bytes
    at_rest = (Kind.MAIN_WEIGHTS, Kind.COMPUTE_WEIGHTS, Kind.GRADIENTS, Kind.MOMENTS)
    kinds = {kind.value: plan.memory[rank].num_bytes[kind] for kind in at_rest}
    return kinds, {key: (counts[key], sizes[key]) for key in counts}


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
        for rank, results in enumerate(by_rank):
            assert results[index] == _planned(config, rank), (index, rank)


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
