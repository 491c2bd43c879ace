"""``shoal train`` in two stages, each a Ray worker, against the same run without Ray."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.checkpoint import Manifest, newest
from shoal.config import config_from_tree
from shoal.training import MetricsReader, TrainJob, TrainResult, train
from tests.e2e.shoal_process import ShoalProcess
from tests.ranks import RankPool
from tests.training.tiny import MIXTURE, config_tree, make_job, write_text

STEPS = 6


def _train(job: TrainJob) -> TrainResult:
    return train(job)


def _content(folder: Path) -> dict[str, str]:
    """Checksums of everything in the last checkpoint."""
    last = newest(folder / "checkpoints")
    assert last is not None and last.number == STEPS
    return {name: str(record) for name, record in Manifest.read(last.path).files.items()}


@pytest.mark.timeout(600)  # the command starts a Ray of its own
def test_stages_are_workers(tmp_path: Path, ranks: RankPool) -> None:
    write_text(tmp_path / "text.txt")
    tree = config_tree(
        tmp_path,
        model={"config": {**MIXTURE, "num_hidden_layers": 3}},
        cluster={"workers": 2, "device": "cpu"},
        parallel={"pipeline": 2},
        optimizer={"lr": 0.01, "clip": 1.0},
        train={"steps": STEPS, "global_batch": 3},
    )
    calm = {**tree, "run": {**tree["run"], "name": "calm"}}
    ranks.run(2, _train, make_job(config_from_tree(calm)))
    (tmp_path / "run.yaml").write_text(json.dumps(tree))
    with ShoalProcess(["train", "run.yaml"], tmp_path) as run:
        assert run.wait() == 0, run.output
        assert run.left_running() == []
    folder = tmp_path / "runs" / "run"
    assert _content(folder) == _content(tmp_path / "runs" / "calm")
    steps = MetricsReader(folder).poll()
    expected = MetricsReader(tmp_path / "runs" / "calm").poll()
    assert [(s.step, s.loss, s.grad_norm) for s in steps] == [
        (s.step, s.loss, s.grad_norm) for s in expected
    ]
    assert all(step.auxiliary_loss is not None for step in steps)
