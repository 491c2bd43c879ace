"""Those who take something away from a run say so before: it saves, and goes on without it."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.checkpoint import Manifest, newest
from shoal.config import config_from_tree
from shoal.training import EventReader, MetricsReader, train
from tests.e2e.ray_nodes import RayNode
from tests.e2e.shoal_process import ShoalProcess
from tests.ranks import RankPool
from tests.training.tiny import config_tree, make_job, write_text

STEPS = 300
EVERY = 150
"""Steps between two checkpoints: far more than are made between a notice and the end."""


@pytest.fixture
def head(tmp_path: Path) -> Iterator[RayNode]:
    """A cluster that has room for no worker yet."""
    with (
        tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as temp,
        RayNode(tmp_path, num_cpus=0, temp=Path(temp)) as node,
    ):
        yield node


class _Run:
    """A run of two workers, and what can be seen of it."""

    def __init__(self, folder: Path, head: RayNode) -> None:
        self._folder = folder
        self._head = head
        self.path = folder / "runs" / "run"

    def command(self) -> ShoalProcess:
        return ShoalProcess(["train", "run.yaml"], self._folder, **self._head.environment)

    def step(self) -> int:
        steps = MetricsReader(self.path).poll()
        return steps[-1].step if steps else 0

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in EventReader(self.path).poll() if event["event"] == kind]

    def attempts(self) -> int:
        return len(self.events("start"))

    def workers(self) -> list[dict[str, Any]]:
        """Of the last attempt."""
        workers: list[dict[str, Any]] = self.events("start")[-1]["workers"]
        return workers

    def saved(self) -> list[int]:
        return [event["step"] for event in self.events("save")]

    def content(self) -> dict[str, str]:
        """Checksums of everything in the last checkpoint."""
        last = newest(self.path / "checkpoints")
        assert last is not None and last.number == STEPS
        return {name: str(record) for name, record in Manifest.read(last.path).files.items()}


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_run_saves_at_each_notice(tmp_path: Path, head: RayNode, ranks: RankPool) -> None:
    write_text(tmp_path / "text.txt", num_bytes=120_000)
    tree = config_tree(
        tmp_path,
        data={"seq_len": 48},
        cluster={"workers": 2, "device": "cpu", "timeout_s": 20.0, "max_failures": 1},
        train={"steps": STEPS, "global_batch": 8},
        checkpoint={"every": EVERY},
    )
    calm = {**tree, "run": {**tree["run"], "name": "calm"}}
    ranks.run(2, train, make_job(config_from_tree(calm)))
    (tmp_path / "run.yaml").write_text(json.dumps(tree))
    run = _Run(tmp_path, head)

    def began(attempt: int) -> bool:
        return run.attempts() == attempt and run.step() > (run.saved() or [0])[-1]

    with (
        RayNode(tmp_path, num_cpus=1, head=head),
        RayNode(tmp_path, num_cpus=1, head=head) as leaves,
        run.command() as first,
    ):
        # A rank is told.
        first.wait_for(lambda: began(1))
        os.kill(run.workers()[1]["pid"], signal.SIGTERM)
        # A node is told, as a pod that is evicted, and another comes in its place.
        first.wait_for(lambda: began(2))
        leaves.terminate()
        with RayNode(tmp_path, num_cpus=1, head=head) as lost:
            first.wait_for(lambda: began(3))
            # The command is told.
            first.terminate()
            assert first.wait() == 3, first.output
            assert run.saved()[-1] == run.step()
            with run.command() as early:  # before its ranks have begun
                early.wait_for(lambda: "parameters on 2 cpu workers" in early.output)
                early.terminate()
                assert early.wait() == 3, early.output
            with run.command() as last:
                # A node is lost, and nobody was told.
                last.wait_for(lambda: began(4))
                lost.lose()
                last.wait_for(lambda: bool(run.events("failure")))
                with RayNode(tmp_path, num_cpus=1, head=head):
                    assert last.wait() == 0, last.output

    causes = [event["cause"] for event in run.events("notice")]
    assert causes[0] == "SIGTERM to rank 1"
    assert causes[1].startswith("node ") and "is to leave the cluster in" in causes[1]
    assert causes[2:] == ["SIGTERM to the command"]
    (failure,) = run.events("failure")
    assert failure["kind"] == "NodeLost"
    # Each attempt that was told ended where it was, and the next one went on from there.
    resumed = [event["step"] for event in run.events("resume")]
    assert len(resumed) == 4 and resumed[3] == resumed[2]
    assert not any(step % EVERY == 0 for step in resumed)
    assert [step.step for step in MetricsReader(run.path).poll()] == list(range(1, STEPS + 1))
    expected = _Run(tmp_path, head)
    expected.path = tmp_path / "runs" / "calm"
    assert run.content() == expected.content()
