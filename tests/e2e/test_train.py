"""``shoal train`` through all that can happen to a run, against one to which nothing did."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from shoal.checkpoint import Manifest, newest
from shoal.config import config_from_tree
from shoal.training import EventReader, train
from tests.e2e.shoal_process import ShoalProcess
from tests.ranks import RankPool
from tests.training.tiny import MODEL, config_tree, make_job, write_text

STEPS = 160


def _steps(folder: Path) -> list[int]:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line)["step"] for line in lines if line.endswith("\n")]


def _reached(folder: Path, step: int) -> bool:
    return bool(steps := _steps(folder)) and steps[-1] >= step


def _events(folder: Path) -> list[str]:
    return [event["event"] for event in EventReader(folder).poll()]


def _content(folder: Path) -> dict[str, str]:
    """Checksums of everything in the last checkpoint."""
    last = newest(folder / "checkpoints")
    assert last is not None and last.number == STEPS
    return {name: str(record) for name, record in Manifest.read(last.path).files.items()}


@pytest.mark.timeout(900)  # three commands, each of which starts a Ray of its own
def test_a_run_survives_everything_bit_for_bit(tmp_path: Path, ranks: RankPool) -> None:
    write_text(tmp_path / "text.txt", num_bytes=20_000)
    tree = config_tree(
        tmp_path,
        model={"config": {**MODEL, "attention_dropout": 0.1}},
        data={"seq_len": 48},
        cluster={"workers": 2, "device": "cpu", "nvlink_domain": 1, "timeout_s": 20.0},
        sharding={"dense": {"outer": "optimizer", "inner": "parameters"}},
        optimizer={"lr": 0.01, "clip": 1.0, "schedule": {"kind": "cosine", "warmup_steps": 5}},
        train={"steps": STEPS, "global_batch": 8},
        checkpoint={"every": 20},
    )
    calm = {**tree, "run": {**tree["run"], "name": "calm"}}
    ranks.run(2, train, make_job(config_from_tree(calm)))
    (tmp_path / "run.yaml").write_text(json.dumps(tree))
    folder = tmp_path / "runs" / "run"
    command = ["train", "run.yaml"]

    with ShoalProcess(command, tmp_path) as first:
        # A worker is killed: its peers fail, and all go on from the last checkpoint.
        first.wait_for(lambda: _reached(folder, 25))
        workers = next(e["workers"] for e in EventReader(folder).poll() if e["event"] == "start")
        os.kill(workers[1]["pid"], signal.SIGKILL)

        # SIGTERM in the second attempt: the next step is saved, whichever it is.
        first.wait_for(lambda: _events(folder).count("start") == 2)
        first.wait_for(lambda: _reached(folder, 50))
        first.terminate()
        assert first.wait() == 3, first.output
        assert first.left_running() == []
        assert "Rank 1 failed. ProcessDied" in first.output
        assert "Told to end: SIGTERM to the command" in first.output
        assert not any(word in first.output for word in ("ray", "Ray", "Traceback"))
        saved = newest(folder / "checkpoints")
        assert saved is not None and saved.number == _steps(folder)[-1]
        way_on = f"The same command goes on from step {saved.number} ({saved.path})."
        assert f"Stopped by SIGTERM. {way_on}" in first.output

    with ShoalProcess(command, tmp_path) as second:
        # Ctrl-C ends everything at once.
        second.wait_for(lambda: "Going on from step" in second.output)
        second.interrupt()
        assert second.wait() == 130, second.output
        assert second.left_running() == []
        assert "Interrupted. The same command goes on from step" in second.output

    with ShoalProcess(command, tmp_path) as last:
        assert last.wait() == 0, last.output
        assert last.left_running() == []
    assert _steps(folder) == list(range(1, STEPS + 1))
    assert _content(folder) == _content(tmp_path / "runs" / "calm")
    events = _events(folder)
    assert events.count("failure") == 1
    assert events.count("resume") == 3
    assert events.count("notice") == 1
    assert events[-1] == "end"
