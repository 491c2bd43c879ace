"""Saves in the background: the same bytes, no waiting, and what becomes of failures."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shoal.checkpoint import (
    BackgroundSaver,
    OnFailure,
    SaveReport,
    State,
    capture_rng,
    load,
    save,
    steps,
    verify,
)
from shoal.errors import WorkError
from tests.checkpoint import toy
from tests.checkpoint.plain import model_of, trained
from tests.checkpoint.saving import files_of, kill, later, stopped, training
from tests.ranks import RankPool


def _save_both_ways(folder: Path) -> float:
    """Save step 2 in both ways, in the background while later steps are made; the longest stall."""
    run = toy.build(toy.ZERO3_3 if dist.get_world_size() == 3 else toy.ZERO1_2, seed=1)
    reports: list[SaveReport] = []
    with BackgroundSaver(folder / "background", note=reports.append, patience_s=20) as saver:
        for step in (1, 2, 3, 4):
            run.step(step)
            same: dict[str, Any] = {"counters": {"step": step}, "rng": capture_rng()}
            if step == 2:
                save(folder / "direct", step, model=run.model, optimizer=run.optimizer, **same)
            saver.save(step, State(model=run.model, optimizer=run.optimizer, **same))
            saver.poll()
        saver.drain()
        if dist.get_rank() == 0:
            assert [report.step for report in reports] == [1, 2, 3, 4]
    return max((report.stall_s for report in reports), default=0.0)


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_bytes_are_those_of_a_save_that_waits(
    ranks: RankPool, tmp_path: Path, world_size: int
) -> None:
    ranks.run(world_size, _save_both_ways, tmp_path)
    ours, direct = tmp_path / "background" / "step-00000002", tmp_path / "direct" / "step-00000002"
    assert files_of(ours) == files_of(direct)
    assert verify(ours) == ()
    assert [step.number for step in steps(tmp_path / "background")] == [1, 2, 3, 4]
    assert {path.name[:5] for path in (tmp_path / "background").iterdir()} == {"step-"}


def test_steps_go_on_while_the_disk_does_not(tmp_path: Path) -> None:
    with training(tmp_path) as trainer:
        wanted = {name: v.detach().clone() for name, v in trainer.model.named_parameters()}
        with stopped(trainer.saver.writer_pid):
            trainer.save(1)
            for _ in range(3):
                trainer.step()
            assert steps(tmp_path) == ()
        trainer.saver.drain()
    fresh = model_of(5)
    load(tmp_path / "step-00000001", model=fresh, optimizer=trained(fresh, num_steps=0))
    for name, value in fresh.named_parameters():
        assert torch.equal(value, wanted[name])


def test_a_third_save_waits_for_the_first_and_says_so(tmp_path: Path) -> None:
    goes_on = threading.Event()
    with training(tmp_path) as trainer, stopped(trainer.saver.writer_pid) as go_on:

        def lift() -> None:
            goes_on.set()
            go_on()

        trainer.save(1)
        trainer.step()
        trainer.save(2)
        trainer.step()
        timer = later(2.0, lift)  # long after the next save has begun to wait
        trainer.save(3)
        assert goes_on.is_set()
        trainer.saver.drain()
        timer.join()
    assert [step.number for step in steps(tmp_path)] == [1, 2, 3]
    waited = [report.waited_s for report in trainer.reports]
    assert max(waited[:2]) < waited[2] < trainer.reports[2].stall_s


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    with training(tmp_path, keep=2) as trainer:
        for step in range(1, 6):
            trainer.step()
            trainer.save(step)
        trainer.saver.drain()
    assert [step.number for step in steps(tmp_path)] == [4, 5]


def test_a_layout_may_change_between_saves(tmp_path: Path) -> None:
    with training(tmp_path) as trainer:
        trainer.save(1)
        trainer.step()
        trainer.optimizer = trained(trainer.model, num_steps=2, amsgrad=True)
        trainer.save(2)
        trainer.saver.drain()
    for step in (1, 2):
        assert verify(tmp_path / f"step-0000000{step}") == ()
    fresh = model_of(5)
    theirs = trained(fresh, num_steps=0, amsgrad=True)
    load(tmp_path / "step-00000002", model=fresh, optimizer=theirs)
    for ours, other in zip(trainer.model.parameters(), fresh.parameters(), strict=True):
        for name, value in trainer.optimizer.state[ours].items():
            assert torch.equal(theirs.state[other][name], value)


def test_an_end_by_an_error_still_publishes_what_was_saved_before(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="scripted"), training(tmp_path) as trainer:
        trainer.save(1)
        raise RuntimeError("scripted")
    assert [step.number for step in steps(tmp_path)] == [1]
    assert trainer.errors() == [(1, None, False)]


def _kill_a_writer(folder: Path, killed: int, policy: OnFailure) -> list[str]:
    """Kill one rank's writer in the middle of step 2 and save step 3; what was raised, and told."""
    raised = "nothing"
    with training(folder, on_failure=policy) as trainer:
        trainer.save(1)
        trainer.saver.drain()
        trainer.step()
        if dist.get_rank() == killed:
            with stopped(trainer.saver.writer_pid):
                trainer.save(2)
                kill(trainer.saver.writer_pid)
        else:
            trainer.save(2)
        trainer.step()
        try:
            trainer.save(3)
            trainer.step()
            trainer.save(4)
            trainer.saver.drain()
        except WorkError as error:
            raised = str(error)
    return [raised, *(f"{step} {error} {again}" for step, error, again in trainer.errors())]


@pytest.mark.parametrize("killed", [0, 1])
@pytest.mark.parametrize("policy", list(OnFailure))
def test_a_killed_writer_costs_what_the_policy_says(
    ranks: RankPool, tmp_path: Path, killed: int, policy: OnFailure
) -> None:
    raised, told = zip(
        *((r[0], r[1:]) for r in ranks.run(2, _kill_a_writer, tmp_path, killed, policy)),
        strict=True,
    )
    problem = f"Rank {killed}: the process that writes for this rank ended by signal 9."
    found = [step.number for step in steps(tmp_path)]
    if policy is OnFailure.STOP:
        assert raised == (f"Step 2 was not saved. {problem}",) * 2
        assert found == [1]
    else:
        assert raised == ("nothing",) * 2
        assert found == ([1, 2, 3, 4] if policy is OnFailure.RETRY else [1, 3, 4])
    assert f"2 {problem} {policy is OnFailure.RETRY}" in told[0]
    assert told[1] == []
    assert {path.name[:5] for path in tmp_path.iterdir()} == {"step-"}
    assert all(verify(step.path) == () for step in steps(tmp_path))


def test_a_step_that_is_not_there_at_the_end_fails_the_run_whatever_the_policy(
    tmp_path: Path,
) -> None:
    with pytest.raises(WorkError, match="The last state is not saved. Step 2: .* already"):
        with training(tmp_path, on_failure=OnFailure.WARN) as trainer:
            trainer.save(2)
            trainer.step()
            trainer.save(2)
            trainer.saver.settle()  # which does not mind
            assert trainer.saver.num_under_way() == 0
            trainer.saver.drain()
    assert [step.number for step in steps(tmp_path)] == [2]
    assert len(trainer.errors()) == 2


def _save_apart(folder: Path) -> str:
    try:
        with training(folder / str(dist.get_rank())):
            return "entered"
    except WorkError as error:
        return str(error)


def test_folders_that_nodes_do_not_share_are_refused_at_the_start(
    ranks: RankPool, tmp_path: Path
) -> None:
    messages = ranks.run(2, _save_apart, tmp_path)
    assert all("every node must share the run's folder" in message for message in messages)
    assert list(tmp_path.glob("*/*")) == []


def _staging_memory() -> list[str]:
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # others of this process come and go
            links.append(os.readlink(entry))
    return [link for link in links if "shoal-checkpoint" in link]


def test_no_thread_process_or_memory_stays_behind(tmp_path: Path) -> None:
    with training(tmp_path) as trainer:
        trainer.save(1)
        trainer.saver.drain()
        pid = trainer.saver.writer_pid
        assert _staging_memory()
    assert not Path(f"/proc/{pid}").exists()
    assert _staging_memory() == []
    assert not [t for t in threading.enumerate() if t.name.startswith("stage-checkpoint")]
