"""``ray job submit`` with a working directory, on a cluster that asks for a token.

What it trains has two stages, each a Ray worker, and ends as the same run does without Ray.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from shoal.checkpoint import Manifest, newest
from shoal.config import config_from_tree
from shoal.training import EventReader, MetricsReader, train
from tests.e2e.shoal_process import plain_environment
from tests.ranks import RankPool
from tests.training.tiny import MIXTURE, config_tree, make_job, write_text

ROOT = Path(__file__).resolve().parents[2]
RAY = str(Path(sys.executable).with_name("ray"))
STEPS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """A cluster of one node."""

    dashboard: str
    environment: dict[str, str]


@contextmanager
def _head() -> Iterator[Head]:
    """``ray start --head`` with a token of its own, in a folder of its own, on ports it finds."""
    environment = plain_environment(
        RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32), RAY_USAGE_STATS_ENABLED="0"
    )
    # A short path: the names of Ray's sockets below it must stay under 108 characters.
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        command = [RAY, "start", "--head", "--block", "--num-cpus=2", f"--temp-dir={folder}"]
        # The agent takes the job; its usual port may be another Ray's.
        command += ["--port=0", "--dashboard-agent-listen-port=0", "--include-dashboard=true"]
        log = Path(folder) / "start.txt"
        with log.open("w") as output:
            process = subprocess.Popen(
                [*command, "--disable-usage-stats"],
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            yield Head(dashboard=_dashboard(process, log), environment=environment)
        finally:
            process.terminate()
            process.wait(60)


def _dashboard(process: subprocess.Popen[bytes], log: Path) -> str:
    """The address that it tells for jobs, once it does."""
    deadline = time.monotonic() + 120
    while (found := re.search(r"RAY_API_SERVER_ADDRESS='(\S+)'", log.read_text())) is None:
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)
    return found[1]


def _submit(head: Head, working: Path, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Submit ``shoal`` with a working directory and wait for the job's end."""
    command = [RAY, "job", "submit", "--address", head.dashboard, "--working-dir", str(working)]
    command += ["--", "PYTHONPATH=platform:actors", sys.executable, "-m", "shoal", *arguments]
    deadline = time.monotonic() + 120
    while True:
        job = subprocess.run(
            command, env=head.environment, capture_output=True, text=True, timeout=400, cwd=os.sep
        )
        # The dashboard answers before the agent that takes jobs is there.
        if "No available agent" not in job.stderr or time.monotonic() > deadline:
            return job
        time.sleep(1)


def _content(folder: Path) -> dict[str, str]:
    """Checksums of everything in the last checkpoint."""
    last = newest(folder / "checkpoints")
    assert last is not None and last.number == STEPS
    return {name: str(record) for name, record in Manifest.read(last.path).files.items()}


def _watched_copy(working: Path, imports: Path) -> None:
    """Our sources in ``working``; whoever imports them leaves its process's number."""
    for name in ("platform", "actors"):
        shutil.copytree(ROOT / name, working / name, ignore=shutil.ignore_patterns("__pycache__"))
    imports.mkdir()
    with (working / "platform" / "shoal" / "__init__.py").open("a") as package:
        package.write(
            f"import os, pathlib\npathlib.Path({str(imports)!r}, str(os.getpid())).touch()\n"
        )


@pytest.mark.timeout(600)
def test_a_job_trains_from_its_working_directory(tmp_path: Path, ranks: RankPool) -> None:
    working, imports, runs = (tmp_path / name for name in ("working", "imports", "runs"))
    _watched_copy(working, imports)
    write_text(working / "text.txt")
    tree = config_tree(
        working,
        run={"dir": str(runs)},
        model={"config": {**MIXTURE, "num_hidden_layers": 3}},
        cluster={"workers": 2, "device": "cpu"},
        parallel={"pipeline": 2},
        optimizer={"lr": 0.01, "clip": 1.0},
        train={"steps": STEPS, "global_batch": 3},
    )
    calm = {**tree, "run": {**tree["run"], "name": "calm"}}
    ranks.run(2, train, make_job(config_from_tree(calm)))
    tree["data"]["sources"] = [{"path": "text.txt"}]
    (working / "tiny.yaml").write_text(json.dumps(tree))
    with _head() as head:
        job = _submit(head, working, ["train", "tiny.yaml"])
    assert job.returncode == 0, job.stdout + job.stderr
    assert f"step {STEPS}/{STEPS}  loss" in job.stdout
    workers = EventReader(runs / "run").poll()[0]["workers"]
    assert {str(worker["pid"]) for worker in workers} <= {path.name for path in imports.iterdir()}

    assert _content(runs / "run") == _content(runs / "calm")
    steps, expected = (MetricsReader(runs / name).poll() for name in ("run", "calm"))
    assert [(s.step, s.loss, s.grad_norm) for s in steps] == [
        (s.step, s.loss, s.grad_norm) for s in expected
    ]
    assert all(step.auxiliary_loss is not None for step in steps)
