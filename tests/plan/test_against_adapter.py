"""Plans against what the adapter does with the same model on real ranks: bytes and collectives."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from shoal.config import Config, Level
from shoal.fsdp import (
    MixedPrecision,
    bytes_at_rest,
    fully_shard,
    fully_shard_context,
    fully_shard_optimizer,
    microbatch,
    placements_for,
    sharded_parameters,
)
from shoal.fsdp.ledger import Ledger
from shoal.models import Decoder, decoder_units, initialize
from shoal.plan import Kind, Plan, make_plan, read_decoder_config
from shoal.topology import MESH_AXES
from shoal.training import build_optimizer
from tests.plan.configs import EXPERTS, config
from tests.ranks import RankPool

ORDER = list(Level)
PAIRS = [(outer, inner) for inner in ORDER for outer in ORDER[: ORDER.index(inner) + 1]]
TOPOLOGIES = {"1": (1, 1), "2": (2, 2), "2x1": (2, 1), "2x2": (4, 2)}

Calls = dict[tuple[str, str, int], tuple[int, int]]
"""Collectives by kind, axis and ranks: how many, and bytes of their larger sides."""


def _train_one_step(settings: Config) -> tuple[dict[str, int], Calls, int]:
    """Bytes at rest by kind, collectives of the step, and the most staging memory."""
    plan = make_plan(settings)
    meshes = plan.topology.meshes("cpu")
    precision = MixedPrecision(
        main_weights=plan.precision.main_weights,
        main_gradients=plan.precision.main_gradients,
        reduce=plan.precision.reduce,
        compute=plan.precision.compute,
    )
    torch.manual_seed(0)
    ledger = Ledger()
    with torch.device("meta"):
        model = Decoder(read_decoder_config(settings.model), torch.float32)
    with fully_shard_context("cpu", communicators=ledger.communicator) as context:
        for unit in decoder_units(model.config):
            levels = settings.sharding.expert if unit.expert else settings.sharding.dense
            fully_shard(
                model.get_submodule(unit.path),
                meshes.expert if unit.expert else meshes.dense,
                placements_for(levels.outer, levels.inner),
                precision=precision,
            )
    initialize(model, seed=0)
    optimizer = build_optimizer(
        settings.optimizer, sharded_parameters(model), moment_dtype=plan.precision.moments
    )
    fully_shard_optimizer(optimizer)
    shape = (plan.batches.micro_batch, plan.batches.seq_len)
    ledger.clear()
    for index in range(plan.batches.num_microbatches):
        tokens = torch.randint(0, 257, shape)
        with microbatch(context, is_last=index == plan.batches.num_microbatches - 1):
            loss = model(tokens, labels=tokens).loss_sum
            assert loss is not None
            loss.backward()
    optimizer.step()
    rest = bytes_at_rest(model)
    moments = sum(
        value.nbytes
        for state in optimizer.state.values()
        for name, value in state.items()
        if name != "step"
    )
    kinds = {
        Kind.MAIN_WEIGHTS.value: rest.main_weights,
        Kind.COMPUTE_WEIGHTS.value: rest.compute_weights,
        Kind.GRADIENTS.value: rest.gradients,
        Kind.MOMENTS.value: moments,
    }
    axes = {
        tuple(torch.distributed.get_process_group_ranks(mesh.get_group(axis))): axis
        for mesh in (meshes.dense, meshes.expert)
        for axis in MESH_AXES
    }
    calls: Calls = {}
    for collective in ledger.collectives:
        key = (collective.deed, axes[collective.ranks], len(collective.ranks))
        count, nbytes = calls.get(key, (0, 0))
        calls[key] = (count + 1, nbytes + collective.nbytes)
    return kinds, calls, ledger.peak_staging_bytes


def _train_each(all_settings: list[Config]) -> list[tuple[dict[str, int], Calls, int]]:
    return [_train_one_step(settings) for settings in all_settings]


def _planned_calls(plan: Plan) -> Calls:
    counts: Counter[tuple[str, str, int]] = Counter()
    payloads: Counter[tuple[str, str, int]] = Counter()
    for traffic in plan.traffic:
        stream = traffic.stream
        key = (stream.deed, stream.axis, stream.group_size)
        counts[key] += traffic.count
        payloads[key] += traffic.payload_bytes
    return {key: (counts[key], payloads[key]) for key in counts}


def _settings(
    topology: str, outer: Level, inner: Level, num_microbatches: int, **sections: dict[str, Any]
) -> Config:
    world_size, domain = TOPOLOGIES[topology]
    levels = {"outer": outer.value, "inner": inner.value}
    base: dict[str, dict[str, Any]] = {
        "model": {"config": EXPERTS},
        "cluster": {"workers": world_size, "nvlink_domain": domain, "device": "cpu"},
        "train": {"steps": 1, "global_batch": world_size * num_microbatches},
        # the experts one level up where there is one, so that the two kinds differ
        "sharding": {"dense": levels, "expert": {**levels, "inner": _above(inner).value}},
    }
    return config(**{**base, **sections})


def _above(level: Level) -> Level:
    return ORDER[min(ORDER.index(level) + 1, len(ORDER) - 1)]


def _compare(ranks: RankPool, all_settings: list[Config]) -> None:
    world_size = all_settings[0].cluster.workers
    by_rank = ranks.run(world_size, _train_each, all_settings)
    for index, settings in enumerate(all_settings):
        plan = make_plan(settings)
        for rank, results in enumerate(by_rank):
            kinds, calls, staging = results[index]
            planned = plan.memory[rank]
            what = (settings.sharding, settings.precision, settings.train, rank)
            assert {kind: planned.num_bytes[Kind(kind)] for kind in kinds} == kinds, what
            assert _planned_calls(plan) == calls, what
            assert staging <= planned.num_bytes[Kind.COMPUTE_WEIGHTS] + sum(
                planned.num_bytes[kind]
                for kind in (Kind.WHOLE_WEIGHTS, Kind.CONTRIBUTIONS, Kind.ACCUMULATION)
            ), what


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_every_pair_of_levels(ranks: RankPool, topology: str) -> None:
    _compare(ranks, [_settings(topology, outer, inner, 1) for outer, inner in PAIRS])


@pytest.mark.parametrize("topology", ["1", "2x2"])
def test_several_microbatches_in_bf16(ranks: RankPool, topology: str) -> None:
    precision = {"compute": "bf16", "moments": "bf16"}
    _compare(ranks, [_settings(topology, o, i, 3, precision=precision) for o, i in PAIRS])


@pytest.mark.parametrize(
    "sections",
    [
        {"optimizer": {"kind": "sgd"}},
        {"optimizer": {"kind": "sgd", "momentum": 0.9}},
        {"precision": {"compute": "bf16", "main_weights": "bf16", "moments": "bf16"}},
        {"precision": {"compute": "bf16", "main_gradients": "bf16", "reduce": "fp32"}},
    ],
    ids=str,
)
def test_other_optimizers_and_formats(ranks: RankPool, sections: dict[str, dict[str, Any]]) -> None:
    pairs = [(Level.REPLICATE, Level.OPTIMIZER), (Level.OPTIMIZER, Level.PARAMETERS)]
    _compare(ranks, [_settings("2x1", o, i, 2, **sections) for o, i in pairs])
