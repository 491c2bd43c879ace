"""Launches: each task once, by whoever comes, for many callers, after a fork, and until the end."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch

from shoal.ops.fixed.kernel import kernel
from shoal.ops.fixed.memory import read_int, write_int
from shoal.ops.fixed.threads import Helpers, helpers
from shoal.ops.on_threads import on_threads


@kernel(3, "test_count_work")
def _count(task: Any, thread: Any, a: Any) -> None:
    """Count a task's runs and who ran it, after some work that cannot be left out."""
    number = task
    for _ in range(a[2]):
        number = (number * 1103515245 + 12345) % 2147483648
    write_int(a[0] + task * 8, read_int(a[0] + task * 8) + 1 + (number == -1))
    write_int(a[1] + task * 8, thread)


class Counts:
    """Runs of up to 512 tasks."""

    def __init__(self) -> None:
        self.runs, self.by = torch.zeros(512, dtype=torch.int64), torch.full((512,), -1)

    def launch(self, tasks: int, work: int) -> None:
        _count(tasks, self.runs.data_ptr(), self.by.data_ptr(), work)


@pytest.mark.parametrize("number", [1, 2, 3, 5])
def test_each_task_runs_once_in_launches_of_all_sizes(number: int) -> None:
    counts, expected = Counts(), torch.zeros(512, dtype=torch.int64)
    generator = torch.Generator().manual_seed(number)
    with on_threads(number):
        for launch in range(600):
            tasks = int(torch.randint(1, 40, (), generator=generator))
            counts.launch(tasks, 10 ** (launch % 4))
            expected[:tasks] += 1
            assert torch.equal(counts.runs, expected)
    assert 0 <= int(counts.by[:39].min()) <= int(counts.by.max()) < number


def test_helpers_come_if_there_is_enough_to_do() -> None:
    counts = Counts()
    deadline = time.monotonic() + 60
    with on_threads(2):
        while time.monotonic() < deadline and set(counts.by[:64].tolist()) != {0, 1}:
            counts.launch(64, 100_000)
    assert set(counts.by[:64].tolist()) == {0, 1}


def test_many_callers_at_once_get_what_is_theirs() -> None:
    counts = [Counts() for _ in range(4)]

    def call(mine: Counts) -> None:
        for _ in range(200):
            mine.launch(30, 300)

    callers = [threading.Thread(target=call, args=(mine,)) for mine in counts]
    with on_threads(3):
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    for mine in counts:
        assert mine.runs[:30].eq(200).all() and mine.runs[30:].eq(0).all()


def test_helpers_sleep_and_are_woken() -> None:
    counts = Counts()
    with on_threads(3):
        for launch in range(20):
            counts.launch(20, 1000)
            time.sleep(0.002)  # far longer than a helper looks for work
            assert counts.runs[:20].eq(launch + 1).all()


def test_stopped_helpers_end_and_new_ones_can_be_made() -> None:
    for _ in range(3):
        others = set(threading.enumerate())
        made = Helpers()
        table = torch.tensor([_count.address, 0, 0, 3])
        made.run(table.data_ptr(), 1, 3)
        new = set(threading.enumerate()) - others
        assert len(new) == 2
        made.stop()
        assert not any(helper.is_alive() for helper in new)


SCRIPT = """
import os, torch
from tests.ops.fixed.test_threads import Counts
torch.set_num_threads(3)
counts = Counts()
counts.launch(100, 1000)
child = os.fork()
counts.launch(100, 1000)
assert counts.runs[:100].eq(2).all()
if not child:
    os._exit(0)  # torch's own pool of threads ends a child that leaves by the door
assert os.waitpid(child, 0)[1] == 0
print("both ran")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_process_has_helpers_of_its_own() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stdout == "both ran\n" and done.stderr == ""


def test_a_process_has_one_set_of_helpers() -> None:
    assert helpers() is helpers()
