"""Engines of different kinds behind one frontend, as scripted actors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest

from shoal.errors import ConfigError
from shoal.inference import Limits, Request, SamplingParams
from shoal.inference.journal import JournalFull
from shoal_actors.engine import EngineFacts, Pulse
from shoal_deployments.engine_client import EngineUnavailable
from shoal_deployments.engines import Engines
from shoal_deployments.mailbox import Mailbox
from tests.actors.scripted_engine import ScriptedEngine

LIMITS = Limits(vocab_size=257, context_length=512, num_blocks=64, block_size=4)


class _Method:
    """A remote method that gives ``answer``, or nothing for ever."""

    def __init__(self, answer: object, hangs: bool = False) -> None:
        self._answer = answer
        self._hangs = hangs

    def remote(self, *arguments: object) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if not self._hangs:
            future.set_result(self._answer)
        return future


class _Actor:
    """The handle of an engine that takes every request."""

    def __init__(self, hangs: bool = False) -> None:
        self.submit = _Method(None)
        self.abort = _Method(None)
        self.pulse = _Method(Pulse(stats=ScriptedEngine().stats(), busy_s=0.0), hangs)


def _facts(fingerprint: str, passed: bool = True) -> EngineFacts:
    return EngineFacts(limits=LIMITS, fingerprint=fingerprint, certificate={"passed": passed})


def _connected(
    monkeypatch: pytest.MonkeyPatch, facts: Sequence[EngineFacts], actors: Sequence[_Actor]
) -> Engines:
    engines = Engines("tiny", 0, [lambda: None for _ in facts])
    for link, fact, actor in zip(engines._links, facts, actors, strict=True):
        monkeypatch.setattr(link, "facts", fact)
        monkeypatch.setattr(link, "_actor", actor)
        monkeypatch.setattr(link, "_heard", time.monotonic())
    engines._make_card()
    return engines


def test_submitting_tells_the_fingerprint_of_the_engine_that_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def ask() -> dict[int, str | None]:
        facts = [_facts("one"), _facts("two"), _facts("three", passed=False)]
        engines = _connected(monkeypatch, facts, [_Actor() for _ in facts])
        found = {}
        for number in range(9):  # so many that each engine gets some
            params = SamplingParams(max_tokens=8)
            request = Request(id=str(number), prompt=(number,), params=params)
            fingerprint = await engines.submit([request], Mailbox(1000))
            found[engines._held[request.id].place] = fingerprint
        return found

    assert asyncio.run(ask()) == {0: "one", 1: "two", 2: None}


def test_an_engine_that_hangs_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask() -> list[str]:
        facts = [_facts("one"), _facts("one")]
        engines = _connected(monkeypatch, facts, [_Actor(hangs=True), _Actor()])
        return [each.replica for each in await engines.stats()]

    assert asyncio.run(ask()) == ["1"]


def test_who_goes_on_with_a_stream_gets_an_engine_of_its_fingerprint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def ask() -> set[int]:
        facts = [_facts("one"), _facts("two"), _facts("three", passed=False)]
        engines = _connected(monkeypatch, facts, [_Actor() for _ in facts])
        for number in range(9):
            request = Request(id=str(number), prompt=(number,), params=SamplingParams(max_tokens=8))
            assert await engines.submit([request], Mailbox(1000), "two") == "two"
        for unknown in ("three", "four"):
            request = Request(id=unknown, prompt=(1,), params=SamplingParams(max_tokens=8))
            with pytest.raises(ConfigError, match="no engine here has the kernels"):
                await engines.submit([request], Mailbox(1000), unknown)
        return {held.place for held in engines._held.values()}

    assert asyncio.run(ask()) == {1}


def test_a_full_journal_is_told_and_another_engine_is_tried(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def ask() -> int:
        facts = [_facts("one"), _facts("one")]
        actors = [_Actor(), _Actor()]
        actors[0].submit = _Method(JournalFull("The journal waits for its disk."))
        engines = _connected(monkeypatch, facts, actors)
        request = Request(id="r0", prompt=(1,), params=SamplingParams(max_tokens=8))
        await engines.submit([request], Mailbox(1000))
        place = engines._held["r0"].place
        actors[1].submit = actors[0].submit
        with pytest.raises(EngineUnavailable, match="waits for its disk"):
            await engines.submit([request], Mailbox(1000))
        return place

    assert asyncio.run(ask()) == 1
    assert caplog.text == ""  # it says so itself, once
