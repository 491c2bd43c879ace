"""The demo from its start to its answer, with a tiny model in SmolLM2's place."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.data.tiny import write_tokenizer
from tests.deployments.running import write_model
from tests.e2e.shoal_process import MarkedProcess

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo.py"


@pytest.mark.timeout(900)  # five commands, two of which start a Ray
def test_the_demo_ends_with_an_answer_and_leaves_nothing_running(tmp_path: Path) -> None:
    write_tokenizer(write_model(tmp_path / "runs" / "input" / "smollm2", vocab_size=290))
    command = [sys.executable, str(DEMO), "--root", str(tmp_path), "--steps", "2"]
    with MarkedProcess(command, tmp_path, OMP_NUM_THREADS="1") as first:
        first.wait_for(lambda: "Loading transformers" in first.output)
        first.interrupt()
        assert first.wait() == 130, first.output
        assert first.left_running() == []
    assert "step 2/2  loss" in first.output and "Traceback" not in first.output

    # A second start has only the last steps left.
    with MarkedProcess(command, tmp_path, OMP_NUM_THREADS="1") as demo:
        assert demo.wait(timeout_s=480) == 0, demo.output
        assert demo.left_running() == []
    assert "$ shoal import" not in demo.output and "$ shoal export" not in demo.output
    assert "--- runs/demo-export\nclass Queue:" in demo.output
    assert "What is the capital of France?\n> " in demo.output
    assert "kernels tried, all passed." in demo.output
    assert "make serve serves it" in demo.output
