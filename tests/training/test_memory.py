"""Hosts whose memory cannot hold a run are refused before it allocates any."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from shoal.errors import ConfigError
from shoal.plan import make_plan
from shoal.training import TrainJob, memory, train
from shoal.training.memory import HostNeeds, refusal
from tests.ranks import RankPool
from tests.training.tiny import make_config, make_job, write_text


def _needs(*ranks: tuple[str, int, int, int]) -> list[HostNeeds]:
    return [
        HostNeeds(host=host, at_rest=at_rest, copies=copies, free=free)
        for host, at_rest, copies, free in ranks
    ]


@pytest.mark.parametrize(
    ("needs", "field", "problem"),
    [
        (_needs(("a", 3, 4, 14), ("a", 3, 4, 15)), None, ""),
        (_needs(("a", 9, 1, 10), ("b", 9, 1, 10)), None, ""),
        (
            _needs(("b", 0, 1, 9), ("a", 3, 4, 13), ("a", 3, 4, 14)),
            "checkpoint.asynchronous",
            "copies for saves take 8 bytes beside 6 of weights, gradients and moments on a, "
            "where 13 are free for 2 of the 3 ranks",
        ),
        (
            _needs(("a", 0, 4, 3)),
            "checkpoint.asynchronous",
            "copies for saves take 4 bytes on a, where 3 are free for 1 of the 1 ranks",
        ),
        (
            _needs(("a", 3, 0, 5), ("a", 3, 0, 5)),
            "cluster.workers",
            "weights, gradients and moments take 6 bytes on a, where 5 are free for 2 of the 2",
        ),
    ],
)
def test_what_is_refused(
    tmp_path: Path, needs: list[HostNeeds], field: str | None, problem: str
) -> None:
    found = refusal(make_config(tmp_path), needs)
    assert (None if found is None else found.field) == field
    assert found is None or problem in found.problem


def _train(job: TrainJob, free: int) -> str | None:
    """Train on a host with so much memory; the field that is refused, if one is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "available_bytes", lambda: free)
        patch.setattr(memory, "PATIENCE_S", 0.0)
        try:
            train(job)
        except ConfigError as error:
            assert f"on {socket.gethostname()}, where {free:,} are free" in error.problem
            return error.field
    return None


def test_a_run_starts_where_its_memory_is_there(ranks: RankPool, tmp_path: Path) -> None:
    write_text(tmp_path / "text.txt")
    config = make_config(tmp_path, cluster={"workers": 2}, train={"steps": 1})
    plan, job = make_plan(config), make_job(config)
    assert plan.saves is not None
    at_rest = sum(each.at_rest for each in plan.memory)
    copies = plan.saves.copy_bytes(range(2))
    for free, refused in (
        (at_rest - 1, "cluster.workers"),
        (at_rest + copies - 1, "checkpoint.asynchronous"),
        (at_rest + copies, None),
    ):
        assert ranks.run(2, _train, job, free) == [refused] * 2
