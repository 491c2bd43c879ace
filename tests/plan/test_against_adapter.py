"""Plans against what the adapter does with the same model on real ranks: bytes and collectives."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from shoal.config import Config, Level
from shoal.fsdp import (
    Ledger,
    MixedPrecision,
    fully_shard_optimizer,
    microbatch,
    placements_for,
    sharded_parameters,
)
from shoal.models import Decoder, initialize, shard_decoder
from shoal.plan import Kind, Plan, make_plan, read_decoder_config
from shoal.topology import Axis, Topology
from shoal.training import WideOptimizer, build_optimizer
from tests.plan.configs import EXPERTS, config
from tests.plan.measured import Calls, bytes_by_kind, calls_of
from tests.ranks import RankPool

ORDER = list(Level)
PAIRS = [(outer, inner) for inner in ORDER for outer in ORDER[: ORDER.index(inner) + 1]]
TOPOLOGIES = {"1": (1, 1), "2": (2, 2), "2x1": (2, 1), "4": (4, 4), "2x2": (4, 2)}
"""Ranks, and those of a domain."""


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
    torch.manual_seed(torch.distributed.get_rank())  # so that tokens visit experts unevenly
    ledger = Ledger()
    with torch.device("meta"):
        model = Decoder(
            read_decoder_config(settings.model), torch.float32, recompute=settings.train.recompute
        )
    dense, expert = settings.sharding.dense, settings.sharding.expert
    context = shard_decoder(
        model,
        meshes,
        placements_for(dense.outer, dense.inner),
        placements_for(expert.outer, expert.inner),
        precision,
        "cpu",
        communicators=ledger.communicator,
    )
    initialize(model, seed=0)
    optimizer = build_optimizer(
        settings.optimizer, sharded_parameters(model), plan.precision, seed=settings.run.seed
    )
    fully_shard_optimizer(optimizer, precision_aware=isinstance(optimizer, WideOptimizer))
    shape = (plan.batches.micro_batch, plan.batches.seq_len)
    ledger.clear()
    for index in range(plan.batches.num_microbatches):
        tokens = torch.randint(0, 257, shape)
        with microbatch(context, is_last=index == plan.batches.num_microbatches - 1):
            loss = model(tokens, labels=tokens).loss_sum
            assert loss is not None
            loss.backward()
    optimizer.step()
    return bytes_by_kind(model, optimizer), calls_of(ledger), ledger.peak_staging_bytes


def _train_each(all_settings: list[Config]) -> list[tuple[dict[str, int], Calls, int]]:
    return [_train_one_step(settings) for settings in all_settings]


def _planned_calls(plan: Plan, rank: int) -> Calls:
    counts: Counter[tuple[str, tuple[int, ...]]] = Counter()
    payloads: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for traffic in plan.traffic:
        stream = traffic.stream
        members = _group(plan.topology, stream.layers, stream.axis, rank)
        assert len(members) == stream.group_size
        key = (stream.deed, members)
        counts[key] += traffic.count
        payloads[key] += traffic.payload_bytes
    return {key: (counts[key], payloads[key]) for key in counts}


def _group(topology: Topology, layers: str, axis: str, rank: int) -> tuple[int, ...]:
    """The ranks that share a collective with ``rank``."""
    in_view = axis if layers == "dense" or axis == "expert" else f"expert_{axis}"
    return next(group for group in topology.groups(Axis(in_view)) if rank in group)


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
        calls = _evened([results[index][1] for results in by_rank])
        for rank, results in enumerate(by_rank):
            kinds, _, staging = results[index]
            planned = plan.memory[rank]
            what = (settings.sharding, settings.precision, settings.train, rank)
            assert {kind: planned.num_bytes[Kind(kind)] for kind in kinds} == kinds, what
            assert _planned_calls(plan, rank) == calls[rank], what
            assert staging <= planned.num_bytes[Kind.COMPUTE_WEIGHTS] + sum(
                planned.num_bytes[kind]
                for kind in (Kind.WHOLE_WEIGHTS, Kind.CONTRIBUTIONS, Kind.ACCUMULATION)
            ), what


def _evened(by_rank: list[Calls]) -> list[Calls]:
    """What each rank gives away in an all-to-all is up to the routing: the mean of its peers."""

    def evened(key: tuple[str, tuple[int, ...]], count: int, nbytes: int) -> tuple[int, int]:
        deed, members = key
        if deed != "all_to_all":
            return count, nbytes
        total = sum(by_rank[rank][key][1] for rank in members)
        assert total % len(members) == 0
        return count, total // len(members)

    return [{key: evened(key, *call) for key, call in calls.items()} for calls in by_rank]


@pytest.mark.parametrize("topology", [name for name in TOPOLOGIES if name != "4"])
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


@pytest.mark.parametrize(("topology", "degree"), [("2", 2), ("2x2", 2), ("4", 2), ("4", 4)])
@pytest.mark.parametrize("recompute", ["none", "layer"])
def test_shared_experts(ranks: RankPool, topology: str, degree: int, recompute: str) -> None:
    pairs = [(Level.REPLICATE, Level.REPLICATE), (Level.OPTIMIZER, Level.PARAMETERS)]
    cells = []
    for outer, inner in pairs:
        settings = _settings(
            topology,
            outer,
            inner,
            3,
            model={"config": {**EXPERTS, "num_experts": 8}},
            parallel={"expert": degree},
        )
        train = settings.train.model_copy(update={"recompute": recompute})
        cells.append(settings.model_copy(update={"train": train}))
    _compare(ranks, cells)
