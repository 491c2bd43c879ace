"""A gang of workers under Ray Train: values, failures, budgets."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import ray
import torch
import torch.distributed as dist
from ray.train.v2._internal.execution.context import get_train_context

from shoal.errors import ConfigError
from shoal_actors.driver import Cluster, Terminated, termination_raises
from shoal_actors.train.failure import AttemptFailed, describe
from shoal_actors.train.gang import Gang, run_gang
from shoal_actors.train.hang import LATE, SILENT
from shoal_actors.train.pulse import PERIOD_S, Pulse, read_signs


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What happens to rank 1."""

    folder: Path
    deed: Callable[[Path], None]
    """Is given the folder."""


def _refuse(folder: Path) -> None:
    raise ConfigError("data.seq_len", 9, "too long", "Give 8")


def _kill(folder: Path) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(folder: Path) -> None:
    while not read_signs(folder, 2)[1].place.startswith("_stop ("):
        time.sleep(PERIOD_S)  # so that this place is written down
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(3600)  # threads stop one by one: this one might come as far as the next collective


def _dawdle(folder: Path) -> None:
    time.sleep(3600)


def _play(script: Script) -> list[int]:
    """The sum, threads and rank, after two collectives between which the deed happens."""
    rank = dist.get_rank()
    try:
        total = torch.ones(1)
        dist.all_reduce(total)
        with Pulse(script.folder, rank):
            if rank == 1:
                script.deed(script.folder)
            dist.all_reduce(total)
        dist.destroy_process_group()
        return [int(total.item()), torch.get_num_threads(), rank]
    except Exception as error:
        raise describe(rank, error) from None


def _gang(*, timeout_s: float = 10.0, silence_s: float = 60.0) -> Gang:
    return Gang(num_workers=2, device="cpu", threads=1, timeout_s=timeout_s, silence_s=silence_s)


def _run(folder: Path, deed: Callable[[Path], None], gang: Gang | None = None) -> list[int]:
    return run_gang(
        _play,
        Script(folder=folder, deed=deed),
        gang or _gang(),
        folder=folder / "ray",
        logs=folder,
        on_termination=lambda name: 0.0,
    )


def _failure(folder: Path, deed: Callable[[Path], None], gang: Gang | None = None) -> AttemptFailed:
    with pytest.raises(AttemptFailed) as failure:
        _run(folder, deed, gang)
    return failure.value


def _kill_controller(folder: Path) -> None:
    ray.kill(get_train_context().controller_actor)
    _dawdle(folder)


def _await(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.timeout(600)  # five gangs, two of which wait in vain
def test_every_way_to_lose_a_rank_is_told(tmp_path: Path, ray_session: Cluster) -> None:
    refused = _failure(tmp_path, _refuse)
    assert refused.refusal is not None and "in _refuse" in refused.report.traceback
    unwatched = _failure(tmp_path, _kill_controller).report
    assert (unwatched.rank, unwatched.kind) == (None, "ProcessDied")
    # The workers are gone as well.
    _await(lambda: sum(ray_session.now().free_places({"CPU": 1.0}, {})) == 4)
    killed = _failure(tmp_path, _kill).report
    assert (killed.rank, killed.kind) == (1, "ProcessDied")
    # A stopped process says nothing; its peer waited in vain, and its last sign tells where it is.
    stopped = _failure(tmp_path, _stop).report
    assert (stopped.rank, stopped.kind) == (1, SILENT)
    assert "in _stop" in stopped.traceback
    assert "gives no sign any more; last seen before its first step, in _stop (" in stopped.message
    late = _failure(tmp_path, _dawdle).report
    assert (late.rank, late.kind) == (1, LATE)
    assert "in _dawdle" in late.traceback


def _idle(folder: Path) -> None:
    """Runs until it is told to end."""
    (folder / f"pid-{dist.get_rank()}").write_text(str(os.getpid()))
    while not (folder / "end").exists():
        time.sleep(0.05)
    (folder / f"ended-{dist.get_rank()}").touch()


def test_workers_end_by_themselves_at_a_termination(tmp_path: Path, ray_session: Cluster) -> None:
    names: list[str] = []

    def terminate() -> None:
        while len(list(tmp_path.glob("pid-*"))) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    def tell(name: str) -> float:
        names.append(name)
        (tmp_path / "end").touch()
        return 60.0

    timer = threading.Thread(target=terminate)
    timer.start()
    with termination_raises(), pytest.raises(Terminated):
        run_gang(
            _idle,
            tmp_path,
            _gang(),
            folder=tmp_path / "ray",
            logs=tmp_path,
            on_termination=tell,
        )
    timer.join()
    assert names == ["SIGTERM"]
    assert len(list(tmp_path.glob("ended-*"))) == 2
    processes = [Path("/proc", note.read_text()) for note in tmp_path.glob("pid-*")]
    _await(lambda: not any(process.exists() for process in processes))
