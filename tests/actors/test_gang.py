"""A gang of workers under Ray Train: values, failures, budgets."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shoal.errors import ConfigError
from shoal.training import EventKind, EventReader, append_event
from shoal_actors.driver import Cluster, Terminated, termination_raises
from shoal_actors.train.failure import FailureReport, RunFailed, describe
from shoal_actors.train.gang import Gang, run_gang
from shoal_actors.train.hang import LATE, SILENT
from shoal_actors.train.pulse import PERIOD_S, Pulse


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What happens to rank 1 in each attempt; afterwards all goes well."""

    folder: Path
    deeds: tuple[Callable[[], None], ...]


def _raise() -> None:
    raise RuntimeError("scripted")


def _refuse() -> None:
    raise ConfigError("data.seq_len", 9, "too long", "Give 8")


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop() -> None:
    time.sleep(2 * PERIOD_S)  # so that this place is written down
    os.kill(os.getpid(), signal.SIGSTOP)
    _dawdle()  # threads stop one after another: this one may come as far as the next collective


def _dawdle() -> None:
    time.sleep(3600)


def _play(script: Script) -> list[int]:
    """The threads and the attempt, after two collectives between which the deed happens."""
    rank = dist.get_rank()
    try:
        total = torch.ones(1)
        dist.all_reduce(total)
        attempt = len(list(script.folder.glob("attempt-*")))
        dist.barrier()
        if rank == 0:
            (script.folder / f"attempt-{attempt}").write_text(str(os.getpid()))
        with Pulse(script.folder, rank):
            if rank == 1 and attempt < len(script.deeds):
                script.deeds[attempt]()
            dist.all_reduce(total)
        dist.destroy_process_group()
        return [int(total.item()), attempt, torch.get_num_threads(), rank]
    except Exception as error:
        raise describe(rank, error) from None


def _note(folder: Path, report: FailureReport) -> None:
    append_event(folder, EventKind.FAILURE, **report.as_record())


def _gang(*, max_failures: int, timeout_s: float = 5.0, silence_s: float = 60.0) -> Gang:
    return Gang(
        num_workers=2,
        device="cpu",
        threads=1,
        timeout_s=timeout_s,
        silence_s=silence_s,
        max_failures=max_failures,
    )


def _run(
    folder: Path,
    *deeds: Callable[[], None],
    max_failures: int = 3,
    timeout_s: float = 5.0,
    silence_s: float = 60.0,
) -> list[int]:
    gang = _gang(max_failures=max_failures, timeout_s=timeout_s, silence_s=silence_s)
    script = Script(folder=folder, deeds=deeds)
    return run_gang(
        _play,
        script,
        gang,
        folder=folder / "ray",
        logs=folder,
        on_failure=partial(_note, folder),
        before_termination=lambda: None,
    )


def test_every_way_to_lose_a_rank_is_recovered_from(tmp_path: Path, ray_session: Cluster) -> None:
    assert _run(tmp_path, _raise, _kill, _stop) == [4, 3, 1, 0]
    events = EventReader(tmp_path).poll()
    assert [(event["rank"], event["kind"]) for event in events[:2]] == [
        (1, "RuntimeError"),
        (1, "ProcessDied"),
    ]
    assert "in _raise" in events[0]["traceback"]
    # A stopped process says nothing; its peer waited in vain, and its last sign tells where it is.
    assert (events[2]["rank"], events[2]["kind"]) == (1, SILENT)
    assert "in _stop" in events[2]["traceback"]
    assert len(events) == 3
    for attempt, event in enumerate(events):
        began = (tmp_path / f"attempt-{attempt}").stat().st_mtime
        assert datetime.fromisoformat(event["time"]).timestamp() - began < 60


def test_a_rank_that_hangs_is_named_with_its_stack(tmp_path: Path, ray_session: Cluster) -> None:
    # The stopped one does not answer, long before its peer gives up; the other one does answer.
    value = _run(tmp_path, _stop, _dawdle, timeout_s=14, silence_s=8)
    assert value == [4, 2, 1, 0]
    stopped, late = EventReader(tmp_path).poll()
    assert (stopped["rank"], stopped["kind"]) == (1, SILENT)
    assert "in _stop" in stopped["traceback"]
    assert (
        "gives no sign any more; last seen before its first step, in _stop ("
        in (stopped["message"])
    )
    assert (late["rank"], late["kind"]) == (1, LATE)
    assert "in _dawdle" in late["traceback"]
    assert not list((tmp_path / "pulse").glob("*.json"))


def test_the_budget_of_failures_is_kept(tmp_path: Path, ray_session: Cluster) -> None:
    with pytest.raises(RunFailed, match="scripted") as failure:
        _run(tmp_path, _raise, _raise, max_failures=1)
    assert failure.value.report.rank == 1
    assert len(EventReader(tmp_path).poll()) == 2


def test_a_refusal_is_not_repeated(tmp_path: Path, ray_session: Cluster) -> None:
    with pytest.raises(ConfigError) as refusal:
        _run(tmp_path, _refuse)
    assert refusal.value.field == "data.seq_len"
    assert len(EventReader(tmp_path).poll()) == 1


def _idle(folder: Path) -> None:
    """Runs until it is ended."""
    (folder / f"pid-{dist.get_rank()}").write_text(str(os.getpid()))
    while True:
        time.sleep(0.05)


def test_workers_still_run_while_a_termination_is_prepared(
    tmp_path: Path, ray_session: Cluster
) -> None:
    gang = _gang(max_failures=0)
    alive: list[bool] = []

    def processes() -> list[Path]:
        return [Path("/proc") / note.read_text() for note in tmp_path.glob("pid-*")]

    def terminate() -> None:
        while len(processes()) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    timer = threading.Thread(target=terminate)
    timer.start()
    with termination_raises(), pytest.raises(Terminated):
        run_gang(
            _idle,
            tmp_path,
            gang,
            folder=tmp_path / "ray",
            logs=tmp_path,
            on_failure=partial(_note, tmp_path),
            before_termination=lambda: alive.extend(path.exists() for path in processes()),
        )
    timer.join()
    assert alive == [True, True]
    deadline = time.monotonic() + 20
    while any(path.exists() for path in processes()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
