"""Which failure ends an attempt, by what Ray's polls of the workers find."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray.train.v2._internal.exceptions import WorkerHealthCheckTimeoutError

from shoal_actors.train.failure import AttemptFailed, FailureReport, describe
from shoal_actors.train.failure_watch import FailureWatch
from shoal_actors.train.hang import Diagnosis
from shoal_actors.train.pulse import Sign, sign_path, write_sign

SIGN = Sign(
    rank=1,
    host="here",
    pid=7,
    beat=1,
    step=3,
    is_waiting=False,
    seconds=9.0,
    place="work (job.py:3)",
    stack="job.py",
)


def _report(folder: Path, errors: dict[int, BaseException], gone: dict[str, str]) -> FailureReport:
    """Of two ranks on two nodes, of which some are gone."""
    (folder / "pulse").mkdir()
    for rank in range(2):
        write_sign(sign_path(folder, rank), replace(SIGN, rank=rank))
    watch = FailureWatch(Diagnosis(folder=folder, num_ranks=2), loss_of=gone.get)
    workers = [SimpleNamespace(metadata=SimpleNamespace(node_id=f"node-{r}")) for r in range(2)]
    watch.after_worker_group_start(SimpleNamespace(get_workers=lambda: workers))
    watch.after_worker_group_poll_status(SimpleNamespace(errors={}))
    with pytest.raises(AttemptFailed) as failure:
        watch.after_worker_group_poll_status(SimpleNamespace(errors=errors))
    return failure.value.report


def test_a_process_that_does_not_answer_is_named_with_its_last_stack(tmp_path: Path) -> None:
    report = _report(tmp_path, {1: WorkerHealthCheckTimeoutError("no answer")}, gone={})
    assert (report.rank, report.kind) == (1, "ProcessSilent")
    assert "last seen after step 3, in work (job.py:3)" in report.message
    assert "job.py" in report.traceback


def test_a_rank_that_fell_silent_with_its_node_is_lost_with_it(tmp_path: Path) -> None:
    broken = RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")
    report = _report(tmp_path, {0: describe(0, broken)}, gone={"node-1": "no heartbeats"})
    assert (report.rank, report.kind) == (1, "NodeLost")
    assert report.message.startswith("its node was lost: no heartbeats; it gives no sign any more")
    assert "job.py" in report.traceback
