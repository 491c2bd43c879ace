"""Muon against torch's in one process, and at every layout against itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shoal.checkpoint import CheckpointWeights
from shoal.config import Config
from shoal.models import InitialWeights, matrix_rows
from shoal.plan import read_decoder_config
from shoal.training import Moments, Muon, orthogonalized, train
from tests.ranks import RankPool
from tests.training.layouts import assert_same_bits, at_every_layout, layout_config
from tests.training.tiny import MIXTURE, MODEL, make_config, make_job, write_text
from tests.training.walks import losses_of_walks

SHAPES = [(24, 66), (66, 24), (33, 33), (1, 8)]
NUM_STEPS = 5


def _weights(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(shape, generator=draw).to(dtype)) for shape in SHAPES]


def _muon(weights: list[nn.Parameter], rows: list[int], compute: torch.dtype) -> Muon:
    return Muon(
        [{"params": weights, "hidden": True}],
        lr=0.02,
        momentum=0.9,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.1,
        moments=Moments(torch.float32),
        matrix_rows=dict(zip(weights, rows, strict=True)),
        compute=compute,
    )


def _run(optimizer: torch.optim.Optimizer, weights: list[nn.Parameter]) -> None:
    draw = torch.Generator().manual_seed(4)
    for _ in range(NUM_STEPS):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=draw)
        optimizer.step()


def test_it_takes_the_steps_of_torch() -> None:
    ours, theirs = _weights(), _weights()
    _run(_muon(ours, [shape[0] for shape in SHAPES], torch.bfloat16), ours)
    options: dict[str, Any] = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}
    _run(torch.optim.Muon(theirs, adjust_lr_fn="match_rms_adamw", **options), theirs)
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=1e-6, atol=1e-7)


def test_stacked_matrices_are_taken_one_by_one() -> None:
    (stacked, *_), (alone, *_) = _weights(), _weights()
    parts = [nn.Parameter(part.clone()) for part in alone.detach().split(8)]
    _run(_muon([stacked], [8], torch.float32), [stacked])
    whole = torch.randn(NUM_STEPS, 24, 66, generator=torch.Generator().manual_seed(4))
    optimizer = _muon(parts, [8, 8, 8], torch.float32)
    for gradient in whole:
        for part, rows in zip(parts, gradient.split(8), strict=True):
            part.grad = rows
        optimizer.step()
    together = torch.cat([part.detach() for part in parts])
    torch.testing.assert_close(stacked.detach(), together, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_directions_stay_and_their_lengths_become_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    inside = left.t() @ orthogonalized(matrix) @ right.t()
    lengths = inside.diagonal()
    assert ((0.6 < lengths) & (lengths < 1.3)).all()
    assert (inside - lengths.diag()).abs().max() < 1e-3
    zero = torch.zeros(shape)
    assert torch.equal(orthogonalized(zero), zero)


def test_matrices_of_a_mixture() -> None:
    settings = {**MIXTURE, "mlp_only_layers": [0]}
    rows = matrix_rows(read_decoder_config(_config(settings).model))
    layers = {name.removeprefix("model.layers.") for name in rows}
    attention = {f"{n}.self_attn.{p}_proj.weight" for n in (0, 1) for p in "qkvo"}
    dense = {f"0.mlp.{p}_proj.weight" for p in ("gate", "up", "down")}
    experts = {"1.mlp.experts.gate_up_proj", "1.mlp.experts.down_proj"}
    assert layers == attention | dense | experts
    assert rows["model.layers.1.mlp.experts.gate_up_proj"] == 30
    assert rows["model.layers.1.mlp.experts.down_proj"] == 66
    assert rows["model.layers.0.mlp.gate_proj.weight"] == 130


def _config(model: dict[str, Any]) -> Config:
    return make_config(Path(), model={"config": model})


@pytest.mark.parametrize("moments", ["fp32", "8bit"])
def test_every_layout_makes_the_same_bits(tmp_path: Path, ranks: RankPool, moments: str) -> None:
    found = at_every_layout(
        tmp_path,
        ranks,
        2,
        optimizer={"kind": "muon", "lr": 0.01, "weight_decay": 0.1},
        precision={"compute": "fp32", "moments": moments},
    )
    expected = assert_same_bits(found)
    assert "momentum_buffer" in expected["model.layers.0.mlp.experts.down_proj"]
    assert "exp_avg_sq" in expected["model.layers.0.mlp.gate.weight"]


def test_runs_end_at_the_same_weights(tmp_path: Path, ranks: RankPool) -> None:
    write_text(tmp_path / "text.txt")
    weights = {}
    for layout in ("one rank", "two stages", "four, HFSDP and HSDP"):
        config = layout_config(
            tmp_path,
            layout,
            run={"name": layout.replace(" ", "-").replace(",", "")},
            optimizer={"kind": "muon", "lr": 0.01, "clip": 1.0},
            train={"steps": 3, "global_batch": 4},
        )
        (result, *_) = ranks.run(config.cluster.workers, train, make_job(config))
        assert result.checkpoint is not None
        weights[layout] = CheckpointWeights(result.checkpoint)
    alone = weights.pop("one rank")
    decoder = read_decoder_config(config.model)
    start = InitialWeights(alone.shapes(), config.run.seed, decoder.initializer_range)
    for layout, others in weights.items():
        for name, shape in alone.shapes().items():
            expected, found = (source.rows(name, 0, shape[0]) for source in (alone, others))
            change = expected - start.rows(name, 0, shape[0])
            assert (found - expected).norm() <= 1e-5 * change.norm() + 1e-7, (layout, name)


def test_it_learns(tmp_path: Path, ranks: RankPool) -> None:
    config = make_config(
        tmp_path,
        model={"config": {**MODEL, "initializer_range": 0.05}},
        optimizer={"kind": "muon", "lr": 0.003},
        train={"steps": 100, "global_batch": 2},
    )
    losses = ranks.run(1, losses_of_walks, config, 100)[0]
    assert sum(losses[-10:]) / 10 < 0.6 * losses[0]
