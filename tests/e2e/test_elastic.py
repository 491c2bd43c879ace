"""A run on a cluster that loses a node and gets it back, against one of a fixed size."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.checkpoint import newest
from shoal.checkpoint.reading import CheckpointReader
from shoal.config import config_from_tree
from shoal.training import EventReader, MetricsReader, StepMetrics, train
from tests.e2e.ray_nodes import RayNode
from tests.e2e.shoal_process import ShoalProcess
from tests.ranks import RankPool
from tests.training.tiny import config_tree, make_job, write_text

STEPS, BATCH = 400, 8


@pytest.fixture
def head(tmp_path: Path) -> Iterator[RayNode]:
    """A cluster with room for two workers."""
    with (
        tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as temp,
        RayNode(tmp_path, num_cpus=2, temp=Path(temp)) as node,
    ):
        yield node


def _metrics(folder: Path) -> list[StepMetrics]:
    return MetricsReader(folder).poll()


def _events(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in EventReader(folder).poll() if event["event"] == kind]


def _end(folder: Path) -> CheckpointReader:
    """The checkpoint of the last step."""
    last = newest(folder / "checkpoints")
    assert last is not None and last.number == STEPS
    return CheckpointReader(last.path)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_run_follows_its_cluster(tmp_path: Path, head: RayNode, ranks: RankPool) -> None:
    write_text(tmp_path / "text.txt", num_bytes=60_000)
    tree = config_tree(
        tmp_path,
        data={"seq_len": 48},
        cluster={"workers": 4, "workers_min": 2, "grow_after_s": 1.0, "timeout_s": 20.0},
        optimizer={"lr": 3e-4, "clip": 1.0, "schedule": {"kind": "cosine", "warmup_steps": 5}},
        train={"steps": STEPS, "global_batch": BATCH},
        checkpoint={"every": 20},
    )
    calm = {**tree, "run": {**tree["run"], "name": "calm"}, "cluster": {"workers": 1}}
    ranks.run(1, train, make_job(config_from_tree(calm)))
    (tmp_path / "run.yaml").write_text(json.dumps(tree))
    folder = tmp_path / "runs" / "run"

    def reached(step: int) -> bool:
        return bool(steps := _metrics(folder)) and steps[-1].step >= step

    def sizes() -> list[int]:
        return [len(event["workers"]) for event in _events(folder, "start")]

    with RayNode(tmp_path, num_cpus=2, head=head) as other:
        run = ShoalProcess(["train", "run.yaml"], tmp_path, **head.environment)
        with run:
            run.wait_for(lambda: reached(25))
            other.lose()
            run.wait_for(lambda: bool(_events(folder, "resize")))
            with RayNode(tmp_path, num_cpus=2, head=head):
                run.wait_for(lambda: sizes() == [4, 2, 4])
                assert run.wait() == 0, run.output

    changes = [(e["from"], e["to"], e["cause"]) for e in _events(folder, "resize")]
    assert changes == [
        (4, 2, "the cluster has no room for more"),
        (2, 4, "the cluster has room for more"),
    ]
    assert len(_events(folder, "failure")) == 1, "to grow is none"
    assert "on 2 of at most 4 cpu workers" in run.output
    assert "Going on as 4 workers instead of 2" in run.output

    # The same sequences in the same order, each once: every step's loss, and the place at the end.
    steps, expected = _metrics(folder), _metrics(tmp_path / "runs" / "calm")
    assert [step.step for step in steps] == list(range(1, STEPS + 1))
    assert [step.labels for step in steps] == [step.labels for step in expected]
    losses, calm_losses = ([step.loss for step in each] for each in (steps, expected))
    assert losses == pytest.approx(calm_losses, rel=1e-5)
    end, calm_end = _end(folder), _end(tmp_path / "runs" / "calm")
    assert end.value("counters")["sampler"] == calm_end.value("counters")["sampler"]
    weights = [key for key in calm_end.keys if key.startswith("model.")]
    assert weights
    for key in weights:
        torch.testing.assert_close(end.tensor(key), calm_end.tensor(key), rtol=1e-5, atol=1e-5)
