"""How many workers an attempt has, and what follows it: policy alone, without any worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import ConfigError, EndedEarly, Misplaced, WorkError
from shoal.training import (
    EventKind,
    EventReader,
    MetricsWriter,
    TrainResult,
    append_event,
)
from shoal_actors.driver import Cluster
from shoal_actors.train.attempts import Attempts
from shoal_actors.train.cut import Cut
from shoal_actors.train.failure import AttemptFailed, FailureReport
from shoal_actors.train.gang import NoRoom
from shoal_actors.train.leaving import Departure, LeavingWatch
from tests.actors.places import Places
from tests.short_disk import file_size_limit
from tests.training.tiny import make_config, metrics_of

Outcomes = list[tuple[TrainResult | Exception, int]]
"""How attempts end, and how many places are free from then on."""


def _failed(*, is_final: bool = False, refusal: ConfigError | None = None) -> AttemptFailed:
    report = FailureReport(
        rank=1,
        kind="ProcessDied",
        message="it was killed",
        traceback="",
        is_consequence=False,
        is_final=is_final,
    )
    return AttemptFailed(report, refusal)


ENDED = TrainResult(step=9, num_steps=9, checkpoint=None)
CUT = TrainResult(step=3, num_steps=9, checkpoint=None, is_cut=True)


def _run(
    folder: Path,
    places: Places,
    outcomes: Outcomes,
    sizes: tuple[int, ...] = (1, 2, 4),
    **cluster: Any,
) -> list[int]:
    """The sizes of the attempts that end as scripted, with so many places from then on."""
    made, left = [], iter(outcomes)

    def attempt(size: int, cut: Cut) -> TrainResult:
        made.append(size)
        outcome, free = next(left)
        places.script = [free]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    config = make_config(folder, cluster=cluster, train={"steps": 9})
    introduced: list[int] = []
    Attempts(
        config=config,
        folder=folder,
        attempt=attempt,
        room=places.room(*sizes),
        leaving=partial(LeavingWatch, folder, own="head", ask=dict),
        introduce=introduced.append,
        pause=lambda seconds: None,
    ).run()
    assert next(left, None) is None
    assert introduced == [size for size, _ in groupby(made)]
    return made


def test_a_run_shrinks_with_its_cluster_and_grows_again(tmp_path: Path) -> None:
    # A node is lost with the first failure; when its place is back, the gang is stopped for it.
    places = Places([4])
    outcomes: Outcomes = [(_failed(), 2), (CUT, 4), (_failed(), 4), (ENDED, 4)]
    assert _run(tmp_path, places, outcomes) == [4, 2, 4, 4]
    events = [(e["event"], e.get("from"), e.get("to")) for e in EventReader(tmp_path).poll()]
    assert events == [
        ("failure", None, None),
        ("resize", 4, 2),
        ("resize", 2, 4),
        ("failure", None, None),
    ]
    assert not places.missing


def test_only_feasible_sizes_are_taken(tmp_path: Path) -> None:
    assert _run(tmp_path, Places([3]), [(ENDED, 0)], sizes=(2, 4)) == [2]


def test_places_lost_at_the_start_cost_no_failure(tmp_path: Path) -> None:
    outcomes: Outcomes = [(NoRoom("gone"), 2), (ENDED, 2)]
    assert _run(tmp_path, Places([4]), outcomes, max_failures=0) == [4, 2]
    assert [event["event"] for event in EventReader(tmp_path).poll()] == ["resize"]


def test_a_run_is_given_up(tmp_path: Path) -> None:
    places = Places([1])
    with pytest.raises(WorkError, match="failed 2 times .*, first so: Rank 1 failed"):
        _run(tmp_path, places, [(_failed(), 1), (_failed(), 1)], max_failures=1)
    with pytest.raises(WorkError, match=r"^Rank 1 failed\. ProcessDied: it was killed\n"):
        _run(tmp_path, places, [(_failed(is_final=True), 1)])
    refusal = ConfigError("a.b", 1, "too small", "Give 2")
    with pytest.raises(ConfigError, match=r"a\.b"):
        _run(tmp_path, places, [(_failed(refusal=refusal), 1)])


MISPLACED = _failed(refusal=Misplaced("a.b", 1, "no memory is left on host", "Give 2"))


def test_a_size_whose_machines_do_not_do_has_no_room_now(tmp_path: Path) -> None:
    """It is no failure of a run that has trained at it, or that asked for another first."""
    trained: Outcomes = [(CUT, 2), (MISPLACED, 2), (ENDED, 2)]
    assert _run(tmp_path, Places([2]), trained, (1, 2), workers=2, max_failures=0) == [2, 2, 1]
    larger: Outcomes = [(MISPLACED, 4), (ENDED, 4)]
    assert _run(tmp_path, Places([4]), larger, workers=2, max_failures=0) == [4, 2]
    events = [(e["event"], e["to"], e["cause"]) for e in EventReader(tmp_path).poll()]
    assert events == [
        ("resize", 1, "with 2, no memory is left on host"),
        ("resize", 2, "with 4, no memory is left on host"),
    ]


def test_what_never_did_at_the_size_asked_for_is_the_user_s_input(tmp_path: Path) -> None:
    with pytest.raises(Misplaced, match=r"a\.b"):
        _run(tmp_path, Places([2]), [(MISPLACED, 2)], (1, 2), workers=2)


def test_only_a_step_shows_that_machines_do(tmp_path: Path) -> None:
    """Not that ranks have begun: they look at the memory of their hosts after that."""
    departures = Departures(tmp_path, [(None, _failed()), (None, MISPLACED)])
    with pytest.raises(Misplaced, match=r"a\.b"):
        departures.run(max_failures=1)


def test_the_only_size_is_waited_for(tmp_path: Path) -> None:
    script: list[tuple[str | None, TrainResult | Exception]]
    script = [(None, _failed()), (None, MISPLACED), (None, ENDED)]
    departures = Departures(tmp_path, script, makes_step=True)
    assert departures.run(max_failures=1) is ENDED
    assert [e["event"] for e in EventReader(tmp_path).poll() if e["event"] == "failure"] == [
        "failure"
    ]


@dataclass
class Departures:
    """A cluster of which, in each attempt, some node is to leave before it ends."""

    folder: Path
    script: list[tuple[str | None, TrainResult | Exception]]
    """The node of each attempt, if any, and how it ends."""
    makes_step: bool = False
    """Whether each attempt makes one before it ends."""
    pauses: list[float] = field(default_factory=list)

    def run(self, **cluster: Any) -> TrainResult:
        """Attempts whose only rank is on the node ``here``."""
        return Attempts(
            config=make_config(self.folder, cluster=cluster, train={"steps": 9}),
            folder=self.folder,
            attempt=self.attempt,
            room=Places([1], delay_s=0.05).room(1),
            leaving=self.watch,
            introduce=lambda size: None,
            pause=self.pauses.append,
        ).run()

    def watch(self, on_departure: Callable[[Departure], None]) -> LeavingWatch:
        self.last = LeavingWatch(self.folder, own="head", ask=dict, on_departure=on_departure)
        return self.last

    def attempt(self, size: int, cut: Cut) -> TrainResult:
        node, outcome = self.script.pop(0)
        append_event(self.folder, EventKind.START, workers=[{"rank": 0, "node": "here"}])
        if self.makes_step:
            with MetricsWriter(self.folder, last_step=0) as metrics:
                metrics.write(metrics_of(1))
        if node is not None:
            self.last.look({node: 0}, now=0.0)
            assert cut.is_ordered
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def test_what_fails_on_a_node_that_is_to_leave_is_not_counted(
    tmp_path: Path, ray_session: Cluster
) -> None:
    departures = Departures(
        tmp_path, [("here", _failed()), ("here", _failed()), ("here", CUT), (None, ENDED)]
    )
    assert departures.run(max_failures=0) is ENDED
    assert departures.pauses == [0.0, 0.0]
    events = [event for event in EventReader(tmp_path).poll() if event["event"] != "start"]
    assert [event["event"] for event in events] == [
        *("notice", "failure"),
        *("notice", "failure"),
        "notice",
    ]
    assert events[0]["cause"] == "node here of ranks 0 is to leave the cluster"


def test_a_full_disk_stops_no_notice_and_hides_no_cause(
    tmp_path: Path, ray_session: Cluster
) -> None:
    append_event(tmp_path, EventKind.START, workers=[{"rank": 0, "node": "here"}])
    room_for_two = 2 * (tmp_path / "events.jsonl").stat().st_size
    departures = Departures(tmp_path, [("here", _failed(is_final=True))])
    with (
        file_size_limit(room_for_two),
        pytest.raises(WorkError, match=r"^Rank 1 failed\. ProcessDied: it was killed\n"),
    ):
        departures.run(max_failures=0)
    assert [event["event"] for event in EventReader(tmp_path).poll()] == ["start", "start"]


@pytest.mark.parametrize("outcome", [CUT, _failed()])
def test_a_run_ends_early_where_the_driver_s_node_is_to_leave(
    tmp_path: Path, ray_session: Cluster, outcome: TrainResult | Exception
) -> None:
    with pytest.raises(EndedEarly, match="node head of the driver is to leave the cluster"):
        Departures(tmp_path, [("head", outcome)]).run(max_failures=0)


def test_a_run_pauses_longer_after_each_failure_in_one_place(tmp_path: Path) -> None:
    departures = Departures(tmp_path, [(None, _failed())] * 4 + [(None, ENDED)])
    departures.run(max_failures=4)
    assert departures.pauses == [0.0, 2.0, 4.0, 8.0]
    failures = [e for e in EventReader(tmp_path).poll() if e["event"] == "failure"]
    assert [failure["in_a_row"] for failure in failures] == [1, 2, 3, 4]
