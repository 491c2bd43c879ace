"""Biases that choose experts: the rule of their steps, and runs that are saved, cut and moved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.checkpoint import CheckpointWeights, Location, Manifest, export, load, newest, save
from shoal.config import Config
from shoal.models import HFWeights
from shoal.plan import resolve_precision
from shoal.training import TrainJob, build_model, build_sharded_optimizer, train
from shoal.training.expert_bias import BiasUpdate
from tests.parallel.matrix import MODELS
from tests.ranks import RankPool
from tests.training.tiny import make_config, make_job, write_text

LAYERS = 5
RATE = 0.01
Biases = dict[str, torch.Tensor]


def _config(
    folder: Path, workers: int, *, name: str = "run", steps: int = 2, **parallel: int
) -> Config:
    return make_config(
        folder,
        run={"name": name},
        model={"config": {**MODELS["biased"], "num_hidden_layers": LAYERS}},
        cluster={"workers": workers, "device": "cpu"},
        parallel=parallel,
        optimizer={"lr": 0.01, "expert_bias_rate": RATE},
        train={"steps": steps, "global_batch": 4},
        checkpoint={"every": 2},
    )


def _train(job: TrainJob) -> int:
    return train(job).step


def _passed_on(config: Config, source: Path, target: Path) -> Biases:
    """Load; save again; this rank's biases."""
    passes = build_model(config, resolve_precision(config), torch.device("cpu"))
    optimizer = build_sharded_optimizer(config, passes.model, resolve_precision(config))
    loaded = load(source, model=passes.model, optimizer=optimizer)
    save(target, loaded.step, model=passes.model, optimizer=optimizer, counters=loaded.counters)
    return dict(passes.model.named_buffers())


def _saved(path: Location) -> Biases:
    weights = CheckpointWeights(path)
    return {
        name: weights.rows(name, 0, shape[0])
        for name, shape in weights.shapes().items()
        if name.endswith("e_score_correction_bias")
    }


@pytest.mark.parametrize(
    ("loads", "signs"),
    [
        ([4, 4, 4, 4], [0, 0, 0, 0]),
        ([0, 0, 0, 16], [1, 1, 1, -1]),
        ([5, 6, 7], [1, 0, -1]),
        # a mean of 2**60 and a third of one: exact in whole numbers only
        ([2**60, 2**60, 2**60 + 1], [1, 1, -1]),
    ],
)
def test_a_bias_goes_towards_the_mean(loads: list[int], signs: list[int]) -> None:
    bias = torch.full((len(loads),), 0.5)
    update = BiasUpdate(biases=(bias,), rate=0.25, ranks=())
    update.apply(torch.tensor([loads]), torch.tensor(False))
    assert bias.tolist() == [0.5] * len(loads)
    update.apply(torch.tensor([loads]), torch.tensor(True))
    assert bias.tolist() == [0.5 + 0.25 * sign for sign in signs]


def test_any_layout_reads_the_biases_that_any_other_wrote(tmp_path: Path, ranks: RankPool) -> None:
    write_text(tmp_path / "text.txt")
    ranks.run(2, _train, make_job(_config(tmp_path, 2, pipeline=2, virtual_stages=2)))
    last = newest(tmp_path / "runs" / "run" / "checkpoints")
    assert last is not None
    expected = _saved(last.path)
    assert sorted(expected) == [
        f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in range(1, LAYERS)
    ]
    for bias in expected.values():
        assert bias.dtype == torch.float32
        assert set((bias / RATE).round().abs().tolist()) <= {0.0, 1.0, 2.0} and bias.any()
    source = last.path
    layouts: list[tuple[int, dict[str, Any]]] = [(2, {"expert": 2}), (1, {}), (4, {"pipeline": 4})]
    for number, (workers, parallel) in enumerate(layouts):
        target = tmp_path / str(number)
        found = ranks.run(
            workers, _passed_on, _config(tmp_path, workers, **parallel), source, target
        )
        for held in found:
            for name, bias in held.items():
                assert torch.equal(bias, expected[name])
        source = target / source.name
        again = _saved(source)
        assert again.keys() == expected.keys()
        assert all(torch.equal(again[name], bias) for name, bias in expected.items())
    _check_export(last.path, tmp_path / "hf", expected)


def _check_export(path: Location, out: Path, expected: Biases) -> None:
    """Files in bf16 hold the biases bit for bit."""
    export(path, out, dtype=torch.bfloat16)
    written = HFWeights(out)
    assert written.rows("model.norm.weight", 0, 1).dtype == torch.bfloat16
    for name, bias in expected.items():
        assert torch.equal(written.rows(name, 0, len(bias)), bias)


def test_a_resumed_run_takes_the_same_steps(tmp_path: Path, ranks: RankPool) -> None:
    write_text(tmp_path / "text.txt")
    contents = []
    for name, legs in (("calm", [4]), ("cut", [2, 4])):
        for steps in legs:
            job = make_job(_config(tmp_path, 2, name=name, steps=steps, expert=2))
            assert ranks.run(2, _train, job) == [steps, steps]
        last = newest(tmp_path / "runs" / name / "checkpoints")
        assert last is not None
        files = Manifest.read(last.path).files
        contents.append({file: str(record) for file, record in files.items()})
    assert contents[0] == contents[1]
