"""The journal over real files, over stores that fail as told, and after a kill."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.config import JournalSettings
from shoal.inference import Output, Request, SamplingParams
from shoal.inference.journal import (
    Began,
    Grew,
    Journal,
    JournaledEngine,
    JournalFull,
    open_journal,
    read_answers,
)
from shoal.inference.journal.records import content_of, decode, encode
from tests.actors.scripted_engine import ScriptedEngine
from tests.inference.scripted_store import FACTS, ScriptedStore, asked

DEADLINE_S = 10.0


@contextmanager
def journaled(
    store: ScriptedStore, **settings: Any
) -> Iterator[tuple[Journal, JournaledEngine, ScriptedEngine]]:
    """A scripted engine whose journal writes to ``store``."""
    values: dict[str, Any] = {"dir": "unused", "fsync": "always"} | settings
    journal = Journal(JournalSettings(**values), store, retry_s=0.02)
    engine = ScriptedEngine()
    journal.start()
    try:
        yield journal, JournaledEngine(engine, journal), engine
    finally:
        store.gate.set()
        journal.close(DEADLINE_S)
        assert store.is_closed


def run_out(engine: JournaledEngine) -> list[Output]:
    """The outputs of all steps there are now."""
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    return outputs


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline, "it did not come to hold"
        time.sleep(0.002)


PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.none() | st.integers(0, 10**9),
    n=st.integers(1, 4),
    temperature=st.floats(0, 1e6),
    top_p=st.floats(0, 1),
    seed=st.none() | st.integers(0, 2**63 - 1),
    stop=st.lists(st.text(min_size=1, max_size=5), max_size=3).map(tuple),
    logit_bias=st.dictionaries(st.integers(0, 300), st.floats(-100, 100), max_size=3).map(
        lambda biases: tuple(biases.items())
    ),
)


@given(PARAMS, st.lists(st.integers(0, 2**31), min_size=1, max_size=9).map(tuple))
def test_a_request_comes_back_as_the_value_it_was(
    params: SamplingParams, prompt: tuple[int, ...]
) -> None:
    began = Began(request=Request(id="r\u2028\n", prompt=prompt, params=params), time=1.5)
    line = encode(began)
    assert line.isascii() and line.count(b"\n") == 1
    content = content_of(line)
    assert content is not None and decode(content) == began


@pytest.mark.parametrize(
    "line",
    [
        encode(Grew(request_id="a", choice=0, position=0, token_ids=(1, 2)))[:-1],
        encode(Grew(request_id="a", choice=0, position=0, token_ids=(1, 2))).replace(b"2]", b"3]"),
        b"\0" * 40 + b"\n",
        b"\n",
        b"0000000g {}\n",
    ],
)
def test_what_is_not_whole_does_not_count(line: bytes) -> None:
    assert content_of(line) is None


def test_the_journal_adds_up_to_what_was_answered(tmp_path: Path) -> None:
    settings = JournalSettings(dir=str(tmp_path), fsync="always", segment_bytes=300)
    journal = open_journal(settings, 0, facts=FACTS)
    engine = JournaledEngine(ScriptedEngine(), journal)
    journal.start()
    requests = {f"r{number}": asked(f"r{number}", number + 1) for number in range(20)}
    for request in requests.values():
        engine.add(request)
    engine.step()
    engine.abort("r9")
    engine.abort("unknown")
    run_out(engine)
    journal.close(DEADLINE_S)
    answers = read_answers(tmp_path)
    assert answers.keys() == requests.keys()
    for name, answer in answers.items():
        size = len(answer.request.prompt)
        assert answer.request == requests[name] and size == 2
        count = requests[name].params.max_tokens
        assert count is not None
        expected = [10] if name == "r9" else list(range(count, 0, -1))
        assert answer.tokens == {0: expected}
        assert answer.finish_reasons == {0: "abort" if name == "r9" else "length"}
    stats = journal.stats()
    assert stats.written == 20 * 2 + sum(range(1, 21)) - 9
    assert (stats.pending, stats.oldest_s, stats.dropped, stats.errors) == (0, 0.0, 0, 0)
    assert len(list((tmp_path / "engine-0").glob("segment-*.journal"))) > 1


def test_steps_go_on_while_a_write_hangs() -> None:
    store = ScriptedStore()
    store.gate.clear()
    with journaled(store) as (journal, engine, _):
        engine.add(asked("r0", 500, durable=True))
        assert store.is_writing.wait(DEADLINE_S)
        outputs = run_out(engine)  # would never end if a step waited for the write
        assert len(outputs) == 499  # all but the last, which is held
        assert journal.stats().pending == 502 and journal.stats().oldest_s > 0
        assert not engine.has_work and store.lines == []
        store.gate.set()
        wait_until(lambda: engine.has_work)
        last = engine.step()
        assert [(each.finish_reason, each.durable) for each in last] == [("length", True)]
        wait_until(lambda: journal.stats().pending == 0)
        # What came while the write hung is one record.
        grown = [record for record in store.records() if isinstance(record, Grew)]
        assert len(grown) <= 2 and sum(len(record.token_ids) for record in grown) == 500


def test_nothing_is_said_to_be_durable_before_it_is() -> None:
    store = ScriptedStore()
    with journaled(store) as (journal, engine, _):
        store.gate.clear()
        for number in range(3):
            engine.add(asked(f"r{number}", 5, durable=number != 1))
        outputs = run_out(engine)
        ended = {each.request_id: each.durable for each in outputs if each.finish_reason}
        assert ended == {"r1": None}
        assert engine.abort("r0") == 0  # its client has left: what was held is given up
        store.gate.set()
        wait_until(lambda: engine.has_work)
        released = engine.step()
        assert [(each.request_id, each.durable) for each in released] == [("r2", True)]
        stored = [record for record in store.records() if isinstance(record, Grew)]
        tokens = [token for each in stored if each.request_id == "r2" for token in each.token_ids]
        assert tokens == [5, 4, 3, 2, 1]


@pytest.mark.parametrize(("fsync", "expected"), [("always", True), ("never", False)])
def test_the_policy_decides_about_syncs(fsync: str, expected: bool) -> None:
    store = ScriptedStore()
    with journaled(store, fsync=fsync) as (journal, engine, _):
        engine.add(asked("r0"))
        run_out(engine)
        wait_until(lambda: journal.stats().pending == 0)
    assert set(store.syncs) == {expected}


def test_an_interval_gathers_steps() -> None:
    store = ScriptedStore()
    with journaled(store, fsync="interval", interval_s=30.0) as (journal, engine, _):
        engine.add(asked("r0"))
        wait_until(lambda: len(store.syncs) == 1)  # the first batch goes at once
        engine.add(asked("r1", 50))
        run_out(engine)
        assert len(store.syncs) == 1 and journal.stats().pending > 50
    # The end of the process does not wait for the interval.
    assert len(store.syncs) == 2 and journal.stats().pending == 0


def test_a_flush_waits_for_no_interval() -> None:
    store = ScriptedStore()
    with journaled(store, fsync="interval", interval_s=30.0) as (journal, engine, _):
        assert journal.flush(DEADLINE_S)  # of nothing
        for number in range(2):
            engine.add(asked(f"r{number}"))
            run_out(engine)
            assert journal.flush(DEADLINE_S)
            assert journal.stats().pending == 0
            assert journal.stats().written == 5 * (number + 1)
        store.gate.clear()
        engine.add(asked("later"))
        assert not journal.flush(0.05)  # the disk is slow
        store.gate.set()
        assert journal.flush(DEADLINE_S)
        engine.add(asked("last"))
        time.sleep(0.05)
        assert journal.stats().pending == 2  # what comes after waits as before


def test_a_full_queue_leaves_out_and_counts(caplog: pytest.LogCaptureFixture) -> None:
    store = ScriptedStore()
    store.gate.clear()
    with journaled(store, queue_tokens=12, when_full="drop") as (journal, engine, _):
        engine.add(asked("r0", 30, durable=True))
        outputs = run_out(engine)
        engine.add(asked("r1", 4, prompt=11, durable=True))  # finds no room at all
        outputs += run_out(engine)
        ended = {each.request_id: each for each in outputs if each.finish_reason}
        assert [ended[name].durable for name in ("r0", "r1")] == [False, False]
        assert "queue was full" in (ended["r0"].durable_problem or "")
        assert journal.stats().pending == 12
        assert journal.stats().dropped == (2 + 30 - 12) + (11 + 4)
        store.gate.set()
        wait_until(lambda: journal.stats().pending == 0)
        engine.add(asked("r2"))  # all is well again
        run_out(engine)
        wait_until(lambda: journal.stats().written == 12 + 5)
    answers = store.records()
    began = [record.request.id for record in answers if isinstance(record, Began)]
    assert began == ["r0", "r2"]
    grown = [record for record in answers if isinstance(record, Grew)]
    tokens = [token for each in grown if each.request_id == "r0" for token in each.token_ids]
    assert tokens == list(range(30, 20, -1))  # a beginning without holes, and no end
    assert all(each.finish_reason is None for each in grown if each.request_id == "r0")
    said = [record.message for record in caplog.records]
    assert [text.rpartition(" ")[0] for text in said] == [
        "the journal's queue is full: tokens are left",
        "the journal's queue has room",
    ]


def test_a_full_queue_refuses_and_keeps_what_was_taken() -> None:
    store = ScriptedStore()
    store.gate.clear()
    with journaled(store, queue_tokens=12, when_full="refuse") as (journal, engine, scripted):
        engine.add(asked("r0", 30, durable=True))
        while journal.stats().pending < 12:
            engine.step()
        with pytest.raises(JournalFull, match="waits for its disk with 12 tokens"):
            engine.add(asked("r1"))
        assert scripted.stats().running == 1
        run_out(engine)
        assert journal.stats().pending == 32  # more than the bound, and nothing lost
        store.gate.set()
        wait_until(lambda: journal.stats().pending == 0)
        assert [each.durable for each in engine.step()] == [True]
        engine.add(asked("r1"))
        run_out(engine)
    assert (journal.stats().dropped, journal.stats().refused) == (0, 1)
    assert journal.stats().written == 32 + 5


def test_a_disk_that_fails_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    store = ScriptedStore()
    store.failure = OSError(errno.ENOSPC, "No space left on device")
    with journaled(store) as (journal, engine, _):
        engine.add(asked("r0", durable=True))
        outputs = run_out(engine)
        assert len(outputs) == 2
        wait_until(lambda: journal.stats().errors >= 3)
        assert journal.stats().failing == 1 and journal.stats().written == 0
        store.failure = None
        wait_until(lambda: engine.has_work)
        assert [each.durable for each in engine.step()] == [True]
        wait_until(lambda: journal.stats().pending == 0)
        assert journal.stats().failing == 0
    said = [record.message for record in caplog.records]
    assert len(said) == 2 and "No space left" in said[0] and "again" in said[1]


def test_the_end_is_told_when_the_disk_takes_too_long() -> None:
    store = ScriptedStore()
    store.failure = OSError(errno.EIO, "Input/output error")
    with journaled(store, ack_timeout_s=0.05) as (journal, engine, _):
        engine.add(asked("r0", durable=True))
        wait_until(lambda: journal.stats().errors > 0)
        run_out(engine)
        wait_until(lambda: engine.has_work)
        last = engine.step()[0]
        assert last.durable is False and last.finish_reason == "length"
        assert last.durable_problem == (
            "It took longer than 0.05 seconds. The journal's disk fails: "
            "OSError: Input/output error."
        )
        assert journal.stats().pending == 5  # and they are still tried


def test_a_mistake_in_the_thread_is_not_silent(caplog: pytest.LogCaptureFixture) -> None:
    store = ScriptedStore()
    store.failure = ValueError("a mistake")
    with journaled(store, when_full="refuse") as (journal, engine, _):
        engine.add(asked("r0"))
        wait_until(lambda: store.is_closed)
        run_out(engine)
        with pytest.raises(JournalFull, match="ValueError: a mistake"):
            engine.add(asked("r1"))
        assert journal.stats().dropped == 3
    assert "the journal failed" in caplog.text
