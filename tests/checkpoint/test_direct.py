"""Saves for which the run waits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from shoal.checkpoint import DirectSaver, OnFailure, SaveReport, State, steps
from shoal.errors import WorkError
from tests.checkpoint.plain import model_of, trained
from tests.ranks import RankPool


def _save_all(folder: Path, numbers: range) -> list[list[int]]:
    """Save steps of which one is kept; those that this rank finds after each."""
    found = []
    model = model_of(1)
    state = State(model=model, optimizer=trained(model, num_steps=1), counters={})
    with DirectSaver(folder, keep=1, note=lambda report: None, group=dist.group.WORLD) as saver:
        for number in numbers:
            saver.save(number, state)
            found.append([step.number for step in steps(folder)])
    return found


def test_no_rank_goes_on_before_older_steps_are_deleted(ranks: RankPool, tmp_path: Path) -> None:
    """The others would wait for it in the next step, and not as long as for a disk."""
    numbers = range(1, 9)
    assert ranks.run(2, _save_all, tmp_path, numbers) == 2 * [[[number] for number in numbers]]


def test_a_run_may_settle_what_it_lost_and_not_end_with_it(tmp_path: Path) -> None:
    reports: list[SaveReport] = []
    model = model_of(1)
    state = State(model=model, optimizer=trained(model, num_steps=1), counters={})
    policy = OnFailure.WARN
    with DirectSaver(tmp_path, note=reports.append, on_failure=policy) as saver:
        saver.save(2, state)
        saver.save(2, state)
        saver.settle()
        with pytest.raises(WorkError, match="The last state is not saved. Step 2: .* already"):
            saver.drain()
        saver.save(3, state)
        saver.drain()
    assert [report.error is None for report in reports] == [True, False, True]
