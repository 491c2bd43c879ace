"""``shoal train`` whose own process is killed, and the same command again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.checkpoint import Manifest, newest
from shoal.config import config_from_tree
from shoal.training import EventReader, MetricsReader, train
from tests.e2e.shoal_process import ShoalProcess
from tests.ranks import RankPool
from tests.training.tiny import MODEL, config_tree, make_job, write_text

STEPS = 120


def _content(folder: Path) -> dict[str, str]:
    """Checksums of everything in the last checkpoint."""
    last = newest(folder / "checkpoints")
    assert last is not None and last.number == STEPS
    return {name: str(record) for name, record in Manifest.read(last.path).files.items()}


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_same_command_goes_on(tmp_path: Path, ranks: RankPool) -> None:
    write_text(tmp_path / "text.txt", num_bytes=20_000)
    tree = config_tree(
        tmp_path,
        model={"config": {**MODEL, "attention_dropout": 0.1}},
        data={"seq_len": 48},
        cluster={"workers": 2, "timeout_s": 20.0},
        train={"steps": STEPS, "global_batch": 8},
        checkpoint={"every": 10},
    )
    calm = {**tree, "run": {**tree["run"], "name": "calm"}}
    ranks.run(2, train, make_job(config_from_tree(calm)))
    (tmp_path / "run.yaml").write_text(json.dumps(tree))
    folder = tmp_path / "runs" / "run"

    with ShoalProcess(["train", "run.yaml"], tmp_path) as lost:
        lost.wait_for(lambda: len(MetricsReader(folder).poll()) >= 25)
        lost.kill()
        assert lost.wait() == -9
        # Workers, writers and Ray end with it, and the folder is free.
        assert lost.left_running() == []
    assert newest(folder / "checkpoints") is not None

    with ShoalProcess(["train", "run.yaml"], tmp_path) as again:
        assert again.wait() == 0, again.output
    assert [step.step for step in MetricsReader(folder).poll()] == list(range(1, STEPS + 1))
    assert _content(folder) == _content(tmp_path / "runs" / "calm")
    events = [event["event"] for event in EventReader(folder).poll() if event["event"] != "save"]
    assert events == ["start", "start", "resume", "end"]
    assert not [path.name for path in (folder / "checkpoints").iterdir() if path.name[0] == "."]
