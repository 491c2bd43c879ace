"""Training in MXFP8 beside bf16, and at every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from shoal.config import Config
from shoal.fsdp import sharded_parameters
from shoal.plan import resolve_precision, topology_of
from shoal.training import Stepper, build_model, build_sharded_optimizer, fill_model
from tests.ranks import RankPool
from tests.training.tiny import WHOLE_BLOCKS, make_config
from tests.training.walks import losses_of_walks, walk

P = {"outer": "parameters", "inner": "parameters"}
O = {"outer": "optimizer", "inner": "optimizer"}  # noqa: E741


class Run(NamedTuple):
    """What one rank saw."""

    losses: list[float]
    norms: list[float]
    held: dict[str, tuple[int, torch.Tensor]]
    """First row and rows of each parameter in the end."""


def _train(config: Config, sequences: int) -> Run:
    """Steps over walks of 31 tokens, ``sequences`` a step over all ranks."""
    precision, topology = resolve_precision(config), topology_of(config)
    passes = build_model(config, precision, torch.device("cpu"))
    fill_model(passes.model, config)
    stepper = Stepper(
        passes,
        build_sharded_optimizer(config, passes.model, precision),
        settings=config.optimizer,
        num_steps=config.train.steps,
        readers=topology.context * topology.pipeline,
    )
    size = sequences // topology.data
    first = size * topology.coordinates(dist.get_rank()).data
    results = [
        stepper.step(step, [walk(sequences * step + first + n, 31) for n in range(size)])
        for step in range(config.train.steps)
    ]
    return Run(
        [result.loss for result in results],
        [result.grad_norm for result in results],
        {p.name: (p.row_start, p.local.detach().clone()) for p in sharded_parameters(passes.model)},
    )


def _configure(folder: Path, workers: int, **sections: dict[str, Any]) -> Config:
    base: dict[str, dict[str, Any]] = {
        "model": {"config": WHOLE_BLOCKS},
        "cluster": {"workers": workers},
        "precision": {"compute": "mxfp8"},
        "sharding": {"dense": P, "expert": P},
        "optimizer": {"kind": "sgd", "lr": 0.1},
        "train": {"steps": 3},
    }
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    return make_config(folder, **base)


def _whole(runs: list[Run]) -> dict[str, torch.Tensor]:
    rows: dict[str, dict[int, torch.Tensor]] = {}
    for run in runs:
        for name, (start, part) in run.held.items():
            if len(part):
                rows.setdefault(name, {})[start] = part
    return {name: torch.cat([held[start] for start in sorted(held)]) for name, held in rows.items()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, ranks: RankPool) -> Run:
    """One process that takes four microbatches a step."""
    runs: list[Run] = ranks.run(1, _train, _configure(tmp_path_factory.mktemp("alone"), 1), 4)
    return runs[0]


@pytest.mark.parametrize(
    ("workers", "sections"),
    [
        (1, {"precision": {"parameter_gather": "bf16"}}),
        (1, {"train": {"recompute": "layer"}}),
        (2, {"sharding": {"dense": O, "expert": P}}),
        (4, {"train": {"recompute": "layer"}}),
        (4, {"precision": {"parameter_gather": "bf16"}}),
    ],
    ids=str,
)
def test_data_parallel_ranks_make_the_same_bits(
    tmp_path: Path, ranks: RankPool, alone: Run, workers: int, sections: dict[str, dict[str, Any]]
) -> None:
    # Each microbatch is one sequence everywhere, so the same tokens share blocks.
    runs = ranks.run(workers, _train, _configure(tmp_path, workers, **sections), 4)
    weights = _whole(runs)
    assert all(run.losses == alone.losses for run in runs)
    assert weights.keys() == alone.held.keys()
    for name, (_, expected) in alone.held.items():
        assert torch.equal(weights[name], expected), name


@pytest.mark.parametrize(
    ("workers", "parallel", "recompute"),
    [
        (2, {"pipeline": 2}, "layer"),
        (2, {"expert": 2}, "none"),
        (2, {"expert": 2}, "layer"),
        (2, {"context": 2}, "none"),
        (4, {"context": 2, "context_exchange": "ring", "expert": 2}, "layer"),
        (4, {"pipeline": 2, "expert": 2}, "none"),
    ],
    ids=str,
)
def test_other_layouts_differ_by_less_than_the_format_rounds(
    tmp_path: Path,
    ranks: RankPool,
    alone: Run,
    workers: int,
    parallel: dict[str, Any],
    recompute: str,
) -> None:
    config = _configure(tmp_path, workers, parallel=parallel, train={"recompute": recompute})
    runs = ranks.run(workers, _train, config, 4)
    weights = _whole(runs)
    for run in runs:
        assert run.losses == pytest.approx(alone.losses, rel=1e-3)
        assert run.norms == pytest.approx(alone.norms, rel=1e-2)
    assert weights.keys() == alone.held.keys()
    for name, (_, expected) in alone.held.items():
        assert (weights[name] - expected).norm() <= 0.01 * expected.norm(), name


def _compare(folder: Path, ranks: RankPool, num_steps: int) -> tuple[float, float, float]:
    """The first loss in bf16, and the mean of the last ten in bf16 and in MXFP8."""
    found = []
    for compute in ("bf16", "mxfp8"):
        config = _configure(
            folder,
            1,
            precision={"compute": compute},
            optimizer={"kind": "adamw", "lr": 3e-3, "clip": 1.0},
            train={"steps": num_steps},
        )
        (losses,) = ranks.run(1, losses_of_walks, config, num_steps)
        found.append(losses)
    bf16, mxfp8 = found
    return bf16[0], sum(bf16[-10:]) / 10, sum(mxfp8[-10:]) / 10


def test_a_mixture_learns_as_in_bf16(tmp_path: Path, ranks: RankPool) -> None:
    first, bf16, mxfp8 = _compare(tmp_path, ranks, 50)
    assert bf16 < 0.8 * first
    assert mxfp8 == pytest.approx(bf16, rel=0.01)
    assert mxfp8 != bf16


@pytest.mark.full
def test_a_mixture_learns_as_in_bf16_for_200_steps(tmp_path: Path, ranks: RankPool) -> None:
    first, bf16, mxfp8 = _compare(tmp_path, ranks, 200)
    assert bf16 < 0.4 * first
    assert mxfp8 == pytest.approx(bf16, rel=0.01)
