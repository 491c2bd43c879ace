"""Plans against what ranks do in other formats and with other optimizers: bytes and collectives.

Those of every layout, in fp32 and with plain SGD, are in ``tests/parallel/test_matrix.py``.
"""

from __future__ import annotations

from typing import Any

import pytest

from shoal.config import Config, Level
from tests.plan.configs import EXPERTS, config
from tests.plan.measured import Measured, assert_as_planned, measure
from tests.ranks import RankPool

ORDER = list(Level)
PAIRS = [(outer, inner) for inner in ORDER for outer in ORDER[: ORDER.index(inner) + 1]]
TOPOLOGIES = {"1": (1, 1), "2x1": (2, 1), "2x2": (4, 2)}
"""Ranks, and those of a domain."""


def _measure_each(all_settings: list[Config]) -> list[Measured]:
    return [measure(settings) for settings in all_settings]


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
    by_rank = ranks.run(all_settings[0].cluster.workers, _measure_each, all_settings)
    for index, settings in enumerate(all_settings):
        assert_as_planned(settings, [results[index] for results in by_rank])


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
        {"precision": {"moments": "8bit"}},
        {"optimizer": {"kind": "muon"}},
        {"optimizer": {"kind": "muon"}, "precision": {"compute": "bf16", "moments": "8bit"}},
    ],
    ids=str,
)
def test_other_optimizers_and_formats(ranks: RankPool, sections: dict[str, dict[str, Any]]) -> None:
    pairs = [(Level.REPLICATE, Level.OPTIMIZER), (Level.OPTIMIZER, Level.PARAMETERS)]
    _compare(ranks, [_settings("2x1", o, i, 2, **sections) for o, i in pairs])


@pytest.mark.parametrize(("topology", "degree"), [("2x2", 1), ("2x2", 2)])
def test_muon(ranks: RankPool, topology: str, degree: int) -> None:
    pairs = [
        (Level.REPLICATE, Level.REPLICATE),
        (Level.OPTIMIZER, Level.PARAMETERS),
        (Level.REPLICATE, Level.GRADIENTS),
    ]
    cells = [
        _settings(
            topology,
            outer,
            inner,
            2,
            model={"config": {**EXPERTS, "num_experts": 8}},
            parallel={"expert": degree},
            optimizer={"kind": "muon"},
            precision={"compute": "bf16", "reduce": "bf16"},
        )
        for outer, inner in pairs
    ]
    _compare(ranks, cells)
