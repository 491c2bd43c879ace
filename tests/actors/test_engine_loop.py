"""The engine's loop and its watchdog over a scripted engine: threads, failures, leases."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import pytest

from shoal.config import JournalSettings
from shoal.errors import ConfigError, Overloaded, WorkError
from shoal.inference import Output, Request, SamplingParams, Submission
from shoal.inference.journal import Journal, JournaledEngine
from shoal_actors.engine.awake import AwakeClock
from shoal_actors.engine.lease import Leases
from shoal_actors.engine.loop import EngineLoop
from shoal_actors.engine.watchdog import Watchdog
from tests.actors.scripted_engine import ScriptedEngine
from tests.inference.scripted_store import ScriptedStore

DEADLINE_S = 10.0


class Owner:
    """Gathers what the loop hands out."""

    def __init__(self) -> None:
        self.steps: list[dict[str, list[Output]]] = []
        self.failures: list[str] = []

    def deliver(self, by_frontend: Mapping[str, list[Output]]) -> None:
        self.steps.append(dict(by_frontend))

    def tokens(self, request_id: str) -> list[int]:
        return [
            token
            for step in self.steps
            for outputs in step.values()
            for output in outputs
            if output.request_id == request_id
            for token in output.token_ids
        ]


@contextmanager
def running(
    engine: ScriptedEngine, clock: Callable[[], float] = time.monotonic
) -> Iterator[tuple[EngineLoop, Owner]]:
    owner = Owner()
    loop = EngineLoop(engine, owner.deliver, owner.failures.append, clock)
    loop.start()
    try:
        yield loop, owner
    finally:
        engine.gate.set()
        loop.stop(DEADLINE_S)


def asked(request_id: str, max_tokens: int | None = 3, frontend: str = "a") -> Submission:
    params = SamplingParams(max_tokens=max_tokens)
    return Submission(request=Request(id=request_id, prompt=(1,), params=params), frontend=frontend)


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline, "it did not come to hold"
        time.sleep(0.005)


def test_each_step_gives_one_list_for_each_frontend() -> None:
    engine = ScriptedEngine()
    engine.gate.clear()
    with running(engine) as (loop, owner):
        first = loop.submit([asked("r0")])
        first.result(DEADLINE_S)
        wait_until(lambda: loop.busy_s > 0)
        others = [loop.submit([asked("r1")]), loop.submit([asked("r2", frontend="b")])]
        assert not any(other.done() for other in others)  # between two steps, never within one
        engine.gate.set()
        wait_until(lambda: len(owner.tokens("r2")) == 3)
        assert owner.tokens("r0") == owner.tokens("r1") == [3, 2, 1]
        both = owner.steps[1]
        assert {each.request_id for each in both["a"]} == {"r0", "r1"}
        assert [each.request_id for each in both["b"]] == ["r2"]
        assert engine.threads == {"engine"}
        wait_until(lambda: loop.stats.running == 0 and loop.busy_s == 0.0)
        assert owner.failures == []


def test_a_submission_is_taken_whole_or_not_at_all() -> None:
    engine = ScriptedEngine(max_waiting=2)
    with running(engine) as (loop, owner):
        with pytest.raises(ConfigError):
            loop.submit([asked("r0"), asked("r1", max_tokens=None)]).result(DEADLINE_S)
        engine.gate.clear()
        loop.submit([asked("r2"), asked("r3")]).result(DEADLINE_S)
        refused = loop.submit([asked("r4")])
        engine.gate.set()
        wait_until(refused.done)
        if refused.exception() is not None:  # unless the two were done before it came
            assert isinstance(refused.exception(), Overloaded)
        wait_until(lambda: len(owner.tokens("r3")) == 3)
        assert engine.aborted == ["r0"] and not owner.tokens("r0")


def test_an_abort_may_overtake_its_submission() -> None:
    engine = ScriptedEngine()
    with running(engine) as (loop, owner):
        loop.abort(["r0"])
        loop.submit([asked("r0"), asked("r1")]).result(DEADLINE_S)
        wait_until(lambda: len(owner.tokens("r1")) == 3)
        assert owner.tokens("r0") == []


@pytest.mark.parametrize("is_stored", [False, True])
def test_what_the_journal_holds_comes_when_it_is_stored_or_late(is_stored: bool) -> None:
    store = ScriptedStore()
    store.gate.clear()
    ack_timeout_s = 10 * DEADLINE_S if is_stored else 0.5
    settings = JournalSettings(dir="unused", fsync="always", ack_timeout_s=ack_timeout_s)
    engine, owner = ScriptedEngine(), Owner()
    journal = Journal(settings, store, progressed=lambda: loop.wake())
    loop = EngineLoop(JournaledEngine(engine, journal), owner.deliver, owner.failures.append)
    leases = Leases(time.monotonic)
    watchdog = Watchdog(
        loop, leases, lapsed=lambda frontend: None, stalled=lambda s: None, stall_s=60.0
    )

    params = SamplingParams(max_tokens=3)
    request = Request(id="r0", prompt=(1,), params=params, durable=True)
    for each in (journal, loop, watchdog):
        each.start()
    try:
        loop.submit([Submission(request=request, frontend="a")]).result(DEADLINE_S)
        wait_until(lambda: not engine.has_work)
        # Nothing is computed any more: only the watchdog, or the journal, can bring the rest.
        if is_stored:
            store.gate.set()
        wait_until(lambda: len(owner.tokens("r0")) == 3)
        assert owner.steps[-1]["a"][0].durable is is_stored
    finally:
        store.gate.set()
        watchdog.stop()
        loop.stop(DEADLINE_S)
        journal.close(DEADLINE_S)


def test_dropping_a_frontend_gives_up_its_requests_alone() -> None:
    engine = ScriptedEngine()
    with running(engine) as (loop, owner):
        loop.submit([asked("r0", 10**6), asked("r1", 10**6, "b")]).result(DEADLINE_S)
        loop.drop("a")
        wait_until(lambda: loop.stats.running == 1)
        assert engine.aborted == ["r0"]
        loop.abort(["r1"])
        wait_until(lambda: loop.stats.running == 0)
        # What is over belongs to nobody any more.
        loop.submit([asked("r2")]).result(DEADLINE_S)
        wait_until(lambda: len(owner.tokens("r2")) == 3)
        for frontend in ("a", "b", "a"):
            loop.drop(frontend)
        loop.submit([asked("r3", frontend="b")]).result(DEADLINE_S)
        assert engine.aborted == ["r0", "r1"]


def test_a_loop_that_fails_says_so_and_refuses_what_comes() -> None:
    engine = ScriptedEngine()
    with running(engine) as (loop, owner):
        engine.gate.clear()
        loop.submit([asked("r0")]).result(DEADLINE_S)
        engine.failure = MemoryError("no room")
        late = loop.submit([asked("r1")])
        engine.gate.set()
        with pytest.raises(WorkError, match="MemoryError: no room"):
            late.result(DEADLINE_S)
        assert owner.failures == ["The engine failed: MemoryError: no room"]
        assert loop.busy_s == 0.0
        with pytest.raises(WorkError):
            loop.submit([asked("r2")]).result(DEADLINE_S)
        loop.abort(["r0"])  # of no use, and no harm


def test_leases_lapse_unless_renewed() -> None:
    now = [0.0]
    leases = Leases(lambda: now[0], lease_s=2.0)
    leases.grant("a")
    leases.grant("b")
    now[0] = 2.0
    assert leases.renew("b") and not leases.renew("c") and leases.take_lapsed() == []
    now[0] = 2.1
    assert leases.take_lapsed() == ["a"]
    assert not leases.holds("a") and leases.holds("b") and not leases.renew("a")
    leases.end("b")
    leases.end("b")
    assert not leases.holds("b") and leases.take_lapsed() == []


def test_the_watchdog_drops_who_is_silent_and_reports_a_step_that_hangs() -> None:
    engine = ScriptedEngine()
    stalled: list[float] = []
    lapsed: list[str] = []
    now = {"lease": 0.0, "turn": 0.0}
    with running(engine, lambda: now["turn"]) as (loop, _):
        leases = Leases(lambda: now["lease"], lease_s=2.0)
        watchdog = Watchdog(loop, leases, lapsed=lapsed.append, stalled=stalled.append, stall_s=0.5)
        leases.grant("a")
        leases.grant("b")
        loop.submit([asked("r0", 10**8), asked("r1", 10**8, "b")]).result(DEADLINE_S)
        watchdog.start()
        now["lease"] = 1.5
        leases.renew("b")
        now["lease"] = 2.5
        wait_until(lambda: engine.aborted == ["r0"] and lapsed == ["a"])
        assert not stalled
        engine.gate.clear()

        def hangs() -> bool:
            now["turn"] += 0.1
            return bool(stalled)

        wait_until(hangs)
        assert stalled[0] > 0.5
        watchdog.stop()


def test_the_watchdog_forgives_that_the_process_itself_stood_still() -> None:
    stood_still_s = 0.0
    clock = AwakeClock(lambda: time.monotonic() + stood_still_s)
    engine = ScriptedEngine()
    stalled: list[float] = []
    with running(engine, clock) as (loop, owner):
        watchdog = Watchdog(
            loop, Leases(clock), lapsed=lambda frontend: None, stalled=stalled.append, stall_s=9.0
        )
        watchdog.start()
        engine.gate.clear()
        loop.submit([asked("r0", 10**8)]).result(DEADLINE_S)
        wait_until(lambda: loop.busy_s > 0)
        stood_still_s = 3600.0
        time.sleep(0.6)
        assert not stalled and loop.busy_s < 9.0
        engine.gate.set()
        wait_until(lambda: len(owner.tokens("r0")) > 3)
        watchdog.stop()


def test_the_watchdog_reports_a_loop_that_hangs_between_steps() -> None:
    engine = ScriptedEngine()
    stalled: list[float] = []
    with running(engine) as (loop, _):
        watchdog = Watchdog(
            loop,
            Leases(time.monotonic),
            lapsed=lambda frontend: None,
            stalled=stalled.append,
            stall_s=0.5,
        )
        watchdog.start()
        time.sleep(1.0)
        wait_until(lambda: loop.busy_s == 0.0)  # between two times that the watchdog wakes it
        assert not stalled, "who has nothing to do does not hang"
        engine.door.clear()
        taken = loop.submit([asked("r0", 10**8)])
        wait_until(lambda: bool(stalled))
        assert stalled[0] > 0.5 and not taken.done()
        engine.door.set()
        taken.result(DEADLINE_S)
        wait_until(lambda: loop.stats.steps > 3 and loop.busy_s < 0.5)
        watchdog.stop()
