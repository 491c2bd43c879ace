"""Which size a run takes in a cluster as it is, and when it is stopped for a larger one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.training import EventKind, MetricsWriter, append_event
from shoal_actors.driver import places_in_order
from shoal_actors.train.growth import Growth
from shoal_actors.train.room import Room
from shoal_actors.train.setbacks import LONGEST_DELAY_S, Setbacks
from tests.actors.places import Places
from tests.training.tiny import metrics_of


def test_below_the_fewest_it_waits_and_says_so_once() -> None:
    places = Places([1])
    assert places.room(2, 4).await_size(2) == 2
    assert places.missing == [
        "the run needs 2 workers of 1 CPU each, and the cluster has 1 such places free"
    ]
    assert set(places.asked) == {4}, "an autoscaler is to bring about the most, all the while"


def test_what_the_last_attempt_leaves_is_not_taken_for_a_lack() -> None:
    """Its places become free a moment later."""
    assert Places([0, 2, 4]).room(2, 4).await_size(4) == 4


@pytest.mark.parametrize(
    ("places", "size"),
    [
        ((3, 3, 2), 4),  # the second domain of 8 would lie on parts of three nodes
        ((4, 4), 8),
        ((2, 2, 2, 2), 8),  # of whole nodes
        ((5, 4), 4),  # the first node is filled, with one of the second domain
        ((4, 2, 2, 1), 8),
        ((3, 2), 4),  # the only domain
        ((3,), None),
    ],
)
def test_room_is_where_domains_stay_whole(places: tuple[int, ...], size: int | None) -> None:
    assert Places([places]).room(4, 8, domain=4).largest(places) == size


def test_a_run_waits_for_whole_domains_and_says_so() -> None:
    assert Places([(3, 3, 2), (4, 4)]).room(8, domain=4).await_size(8) == 8
    with pytest.raises(_Waits) as found:
        replace(Places([(3, 3, 2)]).room(8, domain=4), on_wait=_wait).await_size(8)
    assert str(found.value) == (
        "the run needs 8 workers of 1 CPU each, and the cluster has 8 such places free, on nodes "
        "of 3, 3, 2, which do not keep domains of 4 together"
    )


class _Waits(Exception):
    """With what is missing."""


def _wait(missing: str) -> None:
    raise _Waits(missing)


def test_nodes_are_filled_in_ray_s_order() -> None:
    worker = {"CPU": 2.0, "GPU": 1.0}
    nodes = (
        {"CPU": 3.0, "GPU": 2.0},
        {"CPU": 99.0},
        {"CPU": 100.0, "GPU": 4.0},
        {"CPU": 10.0, "GPU": 5.0},
        {"CPU": 16.0, "GPU": 0.5},
    )
    assert places_in_order(nodes, worker) == (4, 5, 1)


def test_a_size_that_was_put_off_is_not_taken() -> None:
    room = Places([4]).room(2, 4)
    room.put_off(4, "others have the memory")
    assert room.largest((4,)) == room.await_size(4) == 2
    room.put_off(2, "others have all of it")
    with pytest.raises(_Waits, match=r"^with 2 workers, others have all of it$"):
        replace(room, on_wait=_wait).await_size(2)


def test_a_setback_lasts_twice_as_long_each_time() -> None:
    setbacks = Setbacks(first_delay_s=10.0)
    assert setbacks.against(4, 0.0) is None
    for now, ends in ((0.0, 10.0), (50.0, 70.0), (100.0, 140.0)):
        setbacks.count(4, "no memory", now)
        assert setbacks.against(4, ends - 1) == "no memory"
        assert setbacks.against(4, ends) is setbacks.against(8, now) is None
    for _ in range(20):
        setbacks.count(4, "no memory", 0.0)
    assert setbacks.against(4, LONGEST_DELAY_S) is None


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[MetricsWriter]:
    with MetricsWriter(tmp_path, last_step=0) as writer:
        writer.write(metrics_of(1, step_seconds=2.0))  # of the attempt before
        yield writer


def _growth(room: Room, folder: Path, ordered: list[bool], *own: str) -> Growth:
    """Beside workers on the nodes ``own``, which have just begun."""
    growth = Growth(
        room,
        folder,
        size=len(own),
        num_steps=100,
        after_s=50.0,
        order=lambda: ordered.append(True),
    )
    append_event(folder, EventKind.START, workers=[{"rank": 0, "node": node} for node in own])
    return growth


def test_a_gang_is_stopped_for_more_once_it_is_worth_it(
    tmp_path: Path, writer: MetricsWriter
) -> None:
    ordered: list[bool] = []
    places = Places([2])
    growth = _growth(places.room(2, 4, 8), tmp_path, ordered, "a", "a")
    growth.look(0.0)  # before the first step: its workers are only starting
    writer.write(metrics_of(2, step_seconds=2.0))
    growth.look(1000.0)  # the gang has trained from here on
    growth.look(1049.0)
    growth.look(1051.0)
    assert not ordered, "the room may be gone again in a moment"
    growth.look(1053.0)
    assert ordered == [True] and growth.goal == 4
    assert set(places.asked) == {6}


def test_a_gang_near_its_end_goes_on_as_it_is(tmp_path: Path, writer: MetricsWriter) -> None:
    ordered: list[bool] = []
    growth = _growth(Places([6]).room(2, 4, 8), tmp_path, ordered, "a", "a")
    writer.write(metrics_of(76, step_seconds=2.0))  # 24 steps of 2 seconds are left
    for now in (0.0, 100.0, 200.0):
        growth.look(now)
    assert not ordered and growth.goal is None


def test_flickering_room_does_not_stop_a_gang(tmp_path: Path, writer: MetricsWriter) -> None:
    ordered: list[bool] = []
    growth = _growth(Places([2, 0, 2, 0]).room(2, 4, 8), tmp_path, ordered, "a", "a")
    writer.write(metrics_of(2, step_seconds=2.0))
    for now in (0.0, 60.0, 62.0, 64.0, 66.0):
        growth.look(now)
    assert not ordered


@pytest.mark.parametrize(("places", "grows"), [((0, 2, 2), False), ((0, 0, 4), True)])
def test_a_gang_is_not_stopped_for_places_that_would_tear_a_domain(
    tmp_path: Path, writer: MetricsWriter, places: tuple[int, ...], *, grows: bool
) -> None:
    """Its own places count too: of three on the first node and one on the second."""
    ordered: list[bool] = []
    room = Places([places]).room(4, 8, domain=4)
    growth = _growth(room, tmp_path, ordered, "a", "a", "a", "b")
    writer.write(metrics_of(2, step_seconds=2.0))
    for now in (0.0, 60.0, 62.0):
        growth.look(now)
    assert bool(ordered) is grows
