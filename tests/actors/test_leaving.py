"""Nodes that are to leave: which matter to a run, and what its ranks are told."""

from __future__ import annotations

from pathlib import Path

from shoal.training import EventKind, append_event
from shoal_actors.train.leaving import Departure, LeavingWatch


def _watch(folder: Path, told: list[Departure]) -> LeavingWatch:
    """Of a driver on a node called head, whose ranks are noted after an earlier attempt's."""
    _note(folder, "a", "b")
    watch = LeavingWatch(folder, own="head", ask=dict, on_departure=told.append)
    watch.look({"b": 0}, now=0.0)
    assert not told, "ranks of the attempt before are no longer there"
    _note(folder, "b", "c", "b")
    return watch


def _note(folder: Path, *nodes: str) -> None:
    workers = [{"rank": rank, "node": node} for rank, node in enumerate(nodes)]
    append_event(folder, EventKind.START, workers=workers)


def test_the_ranks_of_a_node_that_is_to_leave_are_named(tmp_path: Path) -> None:
    told: list[Departure] = []
    watch = _watch(tmp_path, told)
    watch.look({"a": 0, "d": 0}, now=100.0)  # where nothing of this run is
    assert not told
    watch.look({"a": 0, "b": 130_000}, now=100.0)
    watch.look({"b": 130_000, "c": 0, "head": 0}, now=101.0)  # all are told already
    assert [str(departure) for departure in told] == [
        "node b of ranks 0, 2 is to leave the cluster in 30 s"
    ]
    assert watch.departure is told[0] and not told[0].is_drivers


def test_the_driver_s_node_comes_first(tmp_path: Path) -> None:
    told: list[Departure] = []
    watch = _watch(tmp_path, told)
    watch.look({"b": 130_000, "head": 0}, now=100.0)
    assert [str(departure) for departure in told] == [
        "node head of the driver is to leave the cluster"
    ]
    assert told[0].is_drivers
