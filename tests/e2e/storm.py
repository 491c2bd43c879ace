"""SIGKILLs at random instants of a run; ``python -m tests.e2e.storm`` sends 50.

    calm run ───────────────────────────────────────────► bits ─┐
    stormed run: kill ─ restart ─ kill ─ ... 50 times ─► bits ─┴─ the same?

Every second kill waits for a save: it strikes while files are written, published or pruned. Now and
then it strikes a writing process instead of a rank.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from shoal.checkpoint import Manifest, newest
from shoal.config import config_from_tree
from shoal.training import EventReader, train
from tests.e2e.shoal_process import ShoalProcess
from tests.ranks import RankPool
from tests.training.tiny import MODEL, config_tree, make_job, write_text

NUM_KILLS = 50
STEPS, EVERY = 200, 5
LONGEST_S = 1800.0
"""Time for the whole run."""

STEPS_AHEAD = 2 * EVERY
"""Most steps that an attempt makes before it is struck."""


class Storm:
    """What strikes one run, and where it struck."""

    def __init__(self, run: ShoalProcess, folder: Path, *, seed: int) -> None:
        """``folder`` is the run's."""
        self._run = run
        self._folder = folder
        self._draw = random.Random(seed)
        self._events = EventReader(folder)
        self._workers: list[int] = []
        self._is_down = True
        self.instants: Counter[str] = Counter()
        self.restarts_s: list[float] = []

    def strike(self, *, ceiling: int, spare_ranks: bool) -> None:
        """Kill one process once the ranks run, and have come a random way, not far past a step."""
        begin = time.monotonic()
        if self._is_down:
            self._await_start()
            self.restarts_s.append(time.monotonic() - begin)
        step = self.step()
        goal = self._draw.randint(step, max(step, min(step + STEPS_AHEAD, ceiling)))
        self._run.wait_for(lambda: self.step() >= goal)
        if self._draw.random() < 0.5:
            self._run.wait_for(lambda: bool(self._under_way()))
            time.sleep(self._draw.uniform(0.0, 0.03))
        else:
            time.sleep(self._draw.uniform(0.0, 0.2))
        rank = self._draw.choice(self._workers)
        if spare_ranks:
            self._run.wait_for(lambda: _writer_of(rank) is not None)
        victim = _writer_of(rank) if spare_ranks else rank
        assert victim is not None
        before = self._under_way()
        os.kill(victim, signal.SIGKILL)
        self._is_down = not spare_ranks
        who = "a writing process" if spare_ranks else "a rank"
        self.instants[f"{who}, {_instant(before)}"] += 1

    def step(self) -> int:
        """The last step that the metrics hold."""
        path = self._folder / "metrics.jsonl"
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        whole = [line for line in lines if line.endswith(b"\n")]
        return int(json.loads(whole[-1])["step"]) if whole else 0

    def _await_start(self) -> None:
        """Wait for the next attempt, and note its processes."""

        def started() -> bool:
            for event in self._events.poll():
                if event["event"] == "start":
                    self._workers = [worker["pid"] for worker in event["workers"]]
                    return True
            return False

        self._run.wait_for(started)

    def _under_way(self) -> list[str]:
        """Hidden folders: of saves, and of steps that are being deleted."""
        folder = self._folder / "checkpoints"
        return [path.name for path in folder.glob(".step-*")]


def _instant(hidden: list[str]) -> str:
    kinds = sorted({match[1] for name in hidden if (match := re.search(r"\.([a-z]+)-\w+$", name))})
    words = {"tmp": "inside a save", "old": "inside a deletion"}
    return " and ".join(words.get(kind, kind) for kind in kinds) or "between saves"


def _writer_of(rank: int) -> int | None:
    """The process that writes for the rank whose process is ``rank``."""
    for task in Path(f"/proc/{rank}/task").glob("*/children"):
        for child in task.read_text().split():
            if b"shoal.storage.writer" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
    return None


def main(num_kills: int) -> None:
    """Storm a run, compare it with a calm one, and say how it went; raises where they differ."""
    with tempfile.TemporaryDirectory(prefix="shoal-storm-") as name:
        folder = Path(name)
        write_text(folder / "text.txt", num_bytes=20_000)
        tree = _tree(folder, num_kills)
        calm = {**tree, "run": {**tree["run"], "name": "calm"}}
        pool = RankPool()
        try:
            pool.run(2, train, make_job(config_from_tree(calm)))
        finally:
            pool.close()
        (folder / "run.yaml").write_text(json.dumps(tree))
        begin = time.monotonic()
        with ShoalProcess(["train", "run.yaml"], folder) as run:
            storm = Storm(run, folder / "runs" / "run", seed=num_kills)
            for number in range(num_kills):
                # A run goes on without one of its writing processes: no restart follows.
                ceiling = STEPS * (number + 1) // (num_kills + 1)
                storm.strike(ceiling=ceiling, spare_ranks=number % 10 == 9)
            code = run.wait(LONGEST_S)
            seconds = time.monotonic() - begin
            assert code == 0, run.output
            left = run.left_running()
        sys.stdout.write(_report(folder / "runs", storm, seconds, left))


def _tree(folder: Path, num_kills: int) -> dict[str, Any]:
    return config_tree(
        folder,
        model={"config": {**MODEL, "attention_dropout": 0.1}},
        data={"seq_len": 48},
        cluster={
            "workers": 2,
            "device": "cpu",
            "nvlink_domain": 1,
            "timeout_s": 20.0,
            "max_failures": num_kills,
        },
        sharding={"dense": {"outer": "optimizer", "inner": "parameters"}},
        optimizer={"lr": 0.01, "clip": 1.0, "schedule": {"kind": "cosine", "warmup_steps": 5}},
        train={"steps": STEPS, "global_batch": 8},
        checkpoint={"every": EVERY, "asynchronous": True, "on_failure": "retry"},
    )


def _report(runs: Path, storm: Storm, seconds: float, left: list[str]) -> str:
    """What happened; raises AssertionError where the storm left a trace."""
    run, calm = runs / "run", runs / "calm"
    events = Counter(event["event"] for event in EventReader(run).poll())
    assert left == [], left
    assert [path.name for path in (run / "checkpoints").glob(".*")] == []
    assert not list((run / "logs" / "pulse").iterdir())
    assert _steps(run) == _steps(calm)
    assert len(_steps(run)) == STEPS
    assert _content(run) == _content(calm)
    restarts = sorted(storm.restarts_s)
    lines = [
        f"{storm.instants.total()} SIGKILLs in {seconds:.0f} s, and the run ended by itself:",
        *(f"  {count:3} {instant}" for instant, count in sorted(storm.instants.items())),
        f"{events['start']} attempts, {events['resume']} of them from a checkpoint; "
        f"{events['failure']} failures, {events['save']} saves, "
        f"{events['save_failed']} saves that failed; the ranks ran again after "
        f"{restarts[len(restarts) // 2]:.1f} s (median)",
        f"The loss of each of the {STEPS} steps, and weights, moments, generators and the place in "
        "the data after the last, are bit for bit those of the calm run.",
        "No process and no temporary file is left.",
    ]
    return "\n".join(lines) + "\n"


def _steps(run: Path) -> list[tuple[int, float, float]]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [(record["step"], record["loss"], record["lr"]) for record in map(json.loads, lines)]


def _content(run: Path) -> dict[str, str]:
    """Checksums of everything in the last checkpoint."""
    last = newest(run / "checkpoints")
    assert last is not None and last.number == STEPS
    return {name: str(record) for name, record in Manifest.read(last.path).files.items()}


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else NUM_KILLS)
