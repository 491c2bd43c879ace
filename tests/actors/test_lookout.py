"""Stragglers are named while their peers wait."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from shoal_actors.train.lookout import Lookout
from shoal_actors.train.pulse import PERIOD_S, Pulse, Sign, read_signs, sign_path, write_sign
from tests.ranks import RankPool

DEADLINE_S = 40.0

SIGN = Sign(
    rank=0,
    host="here",
    pid=7,
    beat=1,
    step=3,
    is_waiting=True,
    seconds=9.0,
    place="wait (gloo.py:3)",
    stack="",
)


class _Scene:
    """Signs as ranks would give them, and who was named."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "pulse").mkdir()
        self._told: list[tuple[int, float]] = []
        self._lookout = Lookout(
            folder,
            num_ranks=3,
            patience_s=5.0,
            on_straggler=lambda sign, waited_s: self._told.append((sign.rank, waited_s)),
        )

    def named(self, now: float, *signs: Sign) -> list[tuple[int, float]]:
        """Who is named at ``now`` when these are the newest signs."""
        for sign in signs:
            write_sign(sign_path(self._folder, sign.rank), sign)
        self._told.clear()
        self._lookout.look(now)
        return list(self._told)


def test_the_rank_that_waits_for_nobody_is_named_once(tmp_path: Path) -> None:
    scene = _Scene(tmp_path)
    waits, busy = replace(SIGN, seconds=4.0), replace(SIGN, rank=1, is_waiting=False)
    assert scene.named(0.0, waits, busy, replace(waits, rank=2)) == []  # not for long yet
    assert scene.named(1.0, replace(waits, beat=2, seconds=6.0)) == [(1, 6.0)]
    assert scene.named(2.0, replace(waits, beat=3, seconds=7.0)) == []
    later = replace(waits, beat=4, step=4, seconds=8.0), replace(busy, beat=2, step=4)
    assert scene.named(3.0, *later) == [(1, 8.0)]


def test_a_rank_without_new_signs_is_named_though_it_seemed_to_wait(tmp_path: Path) -> None:
    scene = _Scene(tmp_path)
    assert scene.named(0.0, replace(SIGN, seconds=0.0), replace(SIGN, rank=1, seconds=0.0)) == []
    assert scene.named(6.0, replace(SIGN, beat=2, seconds=6.0)) == [(1, 6.0)]


def test_ranks_that_all_wait_or_all_work_are_left_alone(tmp_path: Path) -> None:
    scene = _Scene(tmp_path)
    assert scene.named(0.0, SIGN, replace(SIGN, rank=1)) == []
    busy = replace(SIGN, is_waiting=False)
    assert scene.named(1.0, replace(busy, beat=2), replace(busy, rank=1, beat=2)) == []


def _tell_of_a_wait(signs: dict[int, Sign]) -> bool:
    return (
        len(signs) == 2
        and signs[0].is_waiting
        and signs[0].seconds >= PERIOD_S
        and signs[1].place.startswith("_signs (")  # rather than where it reads them
    )


def _signs(folder: Path) -> dict[int, Sign]:
    """What both tell once rank 0 is told to wait for rank 1, which sleeps; read by rank 1."""
    signs: dict[int, Sign] = {}
    with Pulse(folder, dist.get_rank()):
        deadline = time.monotonic() + DEADLINE_S
        while dist.get_rank() == 1 and not _tell_of_a_wait(signs) and time.monotonic() < deadline:
            time.sleep(PERIOD_S / 4)
            signs = read_signs(folder, 2)
        dist.barrier()
    return signs


def test_a_rank_in_a_collective_tells_that_it_waits(tmp_path: Path, ranks: RankPool) -> None:
    signs = ranks.run(2, _signs, tmp_path)[1]
    assert _tell_of_a_wait(signs)
    assert not signs[1].is_waiting
    assert "in _signs\n" in signs[1].stack
    assert not list((tmp_path / "pulse").iterdir())
