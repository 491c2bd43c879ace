"""Engines of different kinds behind one frontend, as scripted actors."""

from __future__ import annotations

import asyncio

import pytest

from shoal.errors import ConfigError, Overloaded
from shoal.inference import Request, SamplingParams
from shoal.inference.journal import JournalFull
from shoal_deployments.engine_client import EngineFailed, EngineUnavailable
from shoal_deployments.mailbox import Mailbox
from tests.actors.scripted_actor import DEADLINE_S, Slow
from tests.deployments.scripted_actors import (
    PROMPT,
    Actor,
    asked,
    connected,
    facts_of,
)


def test_submitting_tells_the_fingerprint_of_the_engine_that_computes() -> None:
    async def ask() -> dict[int, str | None]:
        facts = [facts_of("one"), facts_of("two"), facts_of("three", passed=False)]
        engines = await connected([Actor(each) for each in facts])
        found = {}
        for number in range(9):  # so many that each engine gets some
            params = SamplingParams(max_tokens=8)
            request = Request(id=str(number), prompt=(number,), params=params)
            fingerprint = await engines.submit([request], Mailbox(1000))
            found[engines._held.by_id[request.id].place] = fingerprint
        return found

    assert asyncio.run(ask()) == {0: "one", 1: "two", 2: None}


def test_an_engine_that_hangs_does_not_hide_the_others() -> None:
    async def ask() -> list[str]:
        actors = [Actor(), Actor()]
        engines = await connected(actors)
        actors[0].pulse = Slow()
        return [each.replica for each in await engines.stats()]

    assert asyncio.run(ask()) == ["1"]


def test_who_goes_on_with_a_stream_gets_an_engine_of_its_fingerprint() -> None:
    async def ask() -> set[int]:
        facts = [facts_of("one"), facts_of("two"), facts_of("three", passed=False)]
        engines = await connected([Actor(each) for each in facts])
        for number in range(9):
            request = Request(id=str(number), prompt=(number,), params=SamplingParams(max_tokens=8))
            assert await engines.submit([request], Mailbox(1000), "two") == "two"
        for unknown in ("three", "four"):
            request = Request(id=unknown, prompt=(1,), params=SamplingParams(max_tokens=8))
            with pytest.raises(ConfigError, match="no engine here has the kernels"):
                await engines.submit([request], Mailbox(1000), unknown)
        return {held.place for held in engines._held.by_id.values()}

    assert asyncio.run(ask()) == {1}


def test_an_engine_of_other_weights_answers_without_a_promise() -> None:
    """It was started again after the model's folder had been changed."""

    async def scene() -> None:
        actors = [Actor(), Actor(facts_of("one", weights="w2"))]
        engines = await connected(actors)
        first, second = [each.detail for each in await engines.health()]
        assert first == "" and second.startswith("The model's folder was changed while")
        assert all(each.progresses for each in await engines.health())
        promises = set()
        for number in range(9):  # so many that each engine gets some
            fingerprint = await engines.submit([asked(str(number), (number,))], Mailbox(1000))
            promises.add((engines._held.by_id[str(number)].place, fingerprint))
        assert promises == {(0, "one"), (1, None)}
        # A stream that broke goes on with the old weights, or not at all.
        for number in range(9):
            name = f"again {number}"
            assert await engines.submit([asked(name, (number,))], Mailbox(1000), "one") == "one"
            assert engines._held.by_id[name].place == 0

    asyncio.run(scene())


def test_what_a_lost_engine_computed_does_not_go_on_with_other_weights() -> None:
    async def scene() -> None:
        actors = [Actor(), Actor(facts_of("one", weights="w2"))]
        engines = await connected(actors)
        mailbox = Mailbox(1000)
        await engines.submit([asked("r")], mailbox)
        await actors[0].lose()
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(EngineFailed, match="was lost"):
                await mailbox.take()
        assert actors[1].taken == []

    asyncio.run(scene())


def test_what_one_engine_has_no_room_for_another_may_take() -> None:
    async def scene() -> None:
        actors = [Actor(), Actor()]
        actors[0].refusal = ConfigError("prompt", "99 tokens", "the pool has 64", "Shorten it")
        engines = await connected(actors)
        assert await engines.submit([asked("r")], Mailbox(1000)) == "one"
        assert engines._held.by_id["r"].place == 1
        actors[1].refusal = Overloaded("Full.")
        with pytest.raises(Overloaded):  # there it may be taken later
            await engines.submit([asked("s")], Mailbox(1000))
        actors[1].refusal = actors[0].refusal
        with pytest.raises(ConfigError, match="the pool has 64"):
            await engines.submit([asked("t")], Mailbox(1000))
        assert engines._held.by_id.keys() == {"r"}

    asyncio.run(scene())


def test_a_full_journal_is_told_and_another_engine_is_tried(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def ask() -> int:
        actors = [Actor(), Actor()]
        actors[0].refusal = JournalFull("The journal waits for its disk.")
        engines = await connected(actors)
        request = Request(id="r0", prompt=PROMPT, params=SamplingParams(max_tokens=8))
        await engines.submit([request], Mailbox(1000))
        place = engines._held.by_id["r0"].place
        actors[1].refusal = actors[0].refusal
        with pytest.raises(EngineUnavailable, match="waits for its disk"):
            await engines.submit([request], Mailbox(1000))
        return place

    assert asyncio.run(ask()) == 1
    assert caplog.text == ""  # it says so itself, once
