"""``shoal train`` with a rank that stops, at the settings that users get."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from shoal.training import EventReader
from tests.e2e.shoal_process import ShoalProcess
from tests.training.tiny import config_tree, write_text

STEPS = 400


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_stopped_rank_is_named_within_a_minute_and_the_run_goes_on(tmp_path: Path) -> None:
    write_text(tmp_path / "text.txt", num_bytes=20_000)
    tree = config_tree(
        tmp_path,
        cluster={"workers": 2, "device": "cpu"},
        train={"steps": STEPS, "global_batch": 4},
        checkpoint={"every": 20},
    )
    (tmp_path / "run.yaml").write_text(json.dumps(tree))
    folder = tmp_path / "runs" / "run"
    sign = folder / "logs" / "pulse" / "rank-1.json"

    def trains() -> bool:
        return sign.exists() and json.loads(sign.read_text())["step"] is not None

    def failures() -> list[dict[str, Any]]:
        return [e for e in EventReader(folder).poll() if e["event"] == "failure"]

    with ShoalProcess(["train", "run.yaml"], tmp_path) as run:
        run.wait_for(trains)
        os.kill(json.loads(sign.read_text())["pid"], signal.SIGSTOP)
        run.wait_for(lambda: bool(failures()), 60)
        assert run.wait() == 0, run.output
        assert run.left_running() == []
    (failure,) = failures()
    assert (failure["rank"], failure["kind"]) == (1, "ProcessSilent")
    assert "training/loop.py" in failure["traceback"]
    assert "Rank 1 failed. ProcessSilent: it gives no sign any more; last seen after step" in (
        run.output
    )
