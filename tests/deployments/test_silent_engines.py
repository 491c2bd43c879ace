"""Engines that stand still and may come back: their requests go on elsewhere, or wait for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from shoal.errors import Overloaded
from shoal.inference import Output
from shoal_actors.engine import STILL_S
from shoal_actors.engine.awake import LOOK_S
from shoal_deployments.engine_client import EngineFailed, EngineUnavailable
from shoal_deployments.engines import PATIENCE_S, Engines
from shoal_deployments.mailbox import Mailbox
from tests.actors.scripted_actor import Slow, settle
from tests.deployments import scripted_actors
from tests.deployments.scripted_actors import Actor, asked

Scene = Callable[[Engines, list[Actor], Mailbox], Coroutine[Any, Any, None]]


def play(scene: Scene, *fingerprints: str) -> None:
    """Run ``scene`` with a client's mailbox; nothing may be held for it at the end."""

    async def whole(engines: Engines, actors: list[Actor]) -> None:
        await scene(engines, actors, Mailbox(1000))
        assert engines._held.by_id == {}

    scripted_actors.play(whole, *fingerprints)


def outputs(*tokens: int, choice: int = 0, ends: bool = False) -> list[Output]:
    """One after the other, the last of which may be the end."""
    last = len(tokens) - 1
    return [
        Output(
            request_id="r",
            choice=choice,
            token_ids=(token,),
            finish_reason="length" if ends and at == last else None,
        )
        for at, token in enumerate(tokens)
    ]


FAILURE = Output(request_id="r", choice=0, finish_reason="error", error="MemoryError: scripted")


async def tokens_of(mailbox: Mailbox) -> list[int]:
    return [token for each in await mailbox.take() for token in each.token_ids]


async def stand_still(
    engines: Engines, actors: list[Actor], place: int, silent_s: float = STILL_S
) -> None:
    """Have nothing heard of the engine at ``place`` for so long, and its link find that."""
    actor = actors[place]
    actor.now = actor.heard + silent_s
    assert not (await engines.health())[place].progresses
    await asyncio.sleep(LOOK_S)
    await settle()


def test_what_waits_for_an_engine_that_stands_still_goes_on_elsewhere_once() -> None:
    async def scene(engines: Engines, actors: list[Actor], mailbox: Mailbox) -> None:
        await engines.submit([asked("r", n=2)], mailbox)
        engines.on_outputs(0, [*outputs(5, 7), *outputs(6, choice=1)])
        assert await tokens_of(mailbox) == [5, 7, 6]
        await stand_still(engines, actors, 0)
        # The place 1 has other kernels: the same bits come from 2 only.
        assert [len(actor.taken) for actor in actors] == [1, 0, 1]
        assert actors[2].taken[0].moved_from == 0
        assert actors[0].aborted == ["r"]  # that is what it finds when it comes back
        await actors[0].come_back()
        engines.on_outputs(0, [*outputs(9), *outputs(8, choice=1)])  # of the step it stood still in
        engines.on_outputs(2, [*outputs(5, 7, 9, ends=True)])
        engines.on_outputs(2, [*outputs(6, 8, choice=1, ends=True)])
        assert await tokens_of(mailbox) == [9, 8]
        assert (actors[0].aborted, actors[2].aborted) == (["r"], [])

    play(scene, "one", "two", "one")


def test_a_request_leaves_one_engine_only() -> None:
    """A second one that stands still is waited for; a second one that is lost is its end."""

    async def scene(engines: Engines, actors: list[Actor], mailbox: Mailbox) -> None:
        await engines.submit([asked("r")], mailbox)
        await stand_still(engines, actors, 0)
        await stand_still(engines, actors, 1)
        assert [len(actor.taken) for actor in actors] == [1, 1, 0]
        engines.on_outputs(1, outputs(5))
        assert await tokens_of(mailbox) == [5]
        await actors[1].lose()
        with pytest.raises(EngineFailed, match="was lost"):
            await mailbox.take()

    play(scene, "one", "one", "one")


@pytest.mark.parametrize("others", [(), ("two",)], ids=["no other", "other kernels"])
def test_what_nobody_can_go_on_with_waits_but_not_for_ever(others: Sequence[str]) -> None:
    async def scene(engines: Engines, actors: list[Actor], mailbox: Mailbox) -> None:
        await engines.submit([asked("r")], mailbox)
        engines.on_outputs(0, outputs(5))
        await stand_still(engines, actors, 0, STILL_S + PATIENCE_S - 1)
        await actors[0].come_back()
        engines.on_outputs(0, outputs(6))
        assert await tokens_of(mailbox) == [5, 6] and actors[0].aborted == []
        await stand_still(engines, actors, 0, STILL_S + PATIENCE_S)
        with pytest.raises(EngineUnavailable, match="no sign of life for 65 seconds"):
            await mailbox.take()
        assert actors[0].aborted == ["r"]
        assert [len(actor.taken) for actor in actors] == [1] + [0] * len(others)

    play(scene, "one", *others)


def test_an_engine_that_is_full_is_asked_again() -> None:
    async def scene(engines: Engines, actors: list[Actor], mailbox: Mailbox) -> None:
        await engines.submit([asked("r")], mailbox)
        engines.on_outputs(0, outputs(5))
        actors[1].refusal = Overloaded("Full.")
        await stand_still(engines, actors, 0)
        # An abort that an engine remembers would drop the request when it is asked again.
        assert actors[0].aborted == actors[1].aborted == []
        actors[1].refusal = None
        await stand_still(engines, actors, 0, STILL_S + 1)
        assert len(actors[1].taken) == 1 and actors[0].aborted == ["r"]
        engines.on_outputs(1, outputs(5, 6, ends=True))
        assert await tokens_of(mailbox) == [5, 6]

    play(scene, "one", "one")


@pytest.mark.parametrize("is_taken", [True, False])
def test_who_comes_back_while_another_is_asked_is_heard(is_taken: bool) -> None:
    """Whichever is ahead gives the next token, and nothing is lost where the other refuses."""

    async def scene(engines: Engines, actors: list[Actor], mailbox: Mailbox) -> None:
        slow = Slow()
        actors[1].submit = slow
        await engines.submit([asked("r")], mailbox)
        engines.on_outputs(0, outputs(5))
        await stand_still(engines, actors, 0)
        await actors[0].come_back()
        engines.on_outputs(0, outputs(6, 7))
        engines.on_outputs(1, outputs(5, 6, 7, 8))
        engines.on_outputs(0, outputs(8))
        slow.answers[0].set_result(None if is_taken else Overloaded("Full."))
        await settle()
        assert actors[0].aborted == (["r"] if is_taken else [])
        engines.on_outputs(1 if is_taken else 0, outputs(9, ends=True))
        assert await tokens_of(mailbox) == [5, 6, 7, 8, 9]

    play(scene, "one", "one")


def test_who_comes_back_and_ends_the_answer_has_it_given_up_by_who_is_asked() -> None:
    async def scene(engines: Engines, actors: list[Actor], mailbox: Mailbox) -> None:
        slow = Slow()
        actors[1].submit = slow
        await engines.submit([asked("r")], mailbox)
        await stand_still(engines, actors, 0)
        engines.on_outputs(0, outputs(5, ends=True))
        slow.answers[0].set_result(None)
        await settle()
        assert await tokens_of(mailbox) == [5]
        assert (actors[0].aborted, actors[1].aborted) == ([], ["r"])

    play(scene, "one", "one")


@pytest.mark.parametrize("place", [0, 1])
def test_where_one_of_two_fails_the_other_goes_on(place: int) -> None:
    """Whether it was ahead or not; and the one that failed is told to leave the other choice."""

    async def scene(engines: Engines, actors: list[Actor], mailbox: Mailbox) -> None:
        slow = Slow()
        actors[1].submit = slow
        await engines.submit([asked("r", n=2)], mailbox)
        engines.on_outputs(0, outputs(5, 6))
        await stand_still(engines, actors, 0)
        await actors[0].come_back()
        engines.on_outputs(1, outputs(5, 6, 7))
        engines.on_outputs(place, [FAILURE])
        engines.on_outputs(place, outputs(99, choice=1))  # was on its way
        await slow.answer(None)
        assert actors[place].aborted == ["r"]
        other = 1 - place
        if other == 0:
            engines.on_outputs(other, outputs(7))
        engines.on_outputs(other, [*outputs(8, ends=True), *outputs(1, 2, choice=1, ends=True)])
        assert await tokens_of(mailbox) == [5, 6, 7, 8, 1, 2]
        assert actors[other].aborted == []

    play(scene, "one", "one")


def test_what_failed_at_one_and_is_refused_by_the_other_has_failed() -> None:
    async def scene(engines: Engines, actors: list[Actor], mailbox: Mailbox) -> None:
        slow = Slow()
        actors[1].submit = slow
        await engines.submit([asked("r")], mailbox)
        await stand_still(engines, actors, 0)
        engines.on_outputs(0, [FAILURE])
        await slow.answer(Overloaded("Full."))
        with pytest.raises(EngineFailed, match="MemoryError: scripted"):
            await mailbox.take()

    play(scene, "one", "one")


def test_a_client_that_leaves_meanwhile_leaves_both() -> None:
    async def scene(engines: Engines, actors: list[Actor], mailbox: Mailbox) -> None:
        actors[1].submit = Slow()
        await engines.submit([asked("r")], mailbox)
        await stand_still(engines, actors, 0)
        engines.abort(["r"])
        await settle()
        assert actors[0].aborted == actors[1].aborted == ["r"]

    play(scene, "one", "one")


def test_an_engine_that_is_lost_after_all_is_not_waited_for() -> None:
    async def scene(engines: Engines, actors: list[Actor], mailbox: Mailbox) -> None:
        slow = Slow()
        actors[1].submit = slow
        await engines.submit([asked("r")], mailbox)
        await stand_still(engines, actors, 0)
        await actors[0].lose()
        slow.answers[0].set_result(Overloaded("Full."))
        with pytest.raises(EngineFailed, match="was lost"):
            await mailbox.take()

    play(scene, "one", "one")


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_submission_to_an_engine_that_stands_still_goes_to_the_next(has_begun: bool) -> None:
    async def scene(engines: Engines, actors: list[Actor], mailbox: Mailbox) -> None:
        slow = Slow()
        actors[0].submit = slow
        asking = asyncio.create_task(engines.submit([asked("r")], mailbox))
        await settle()
        if has_begun:  # and its word that it took the request did not come any more
            engines.on_outputs(0, outputs(5))
        assert not asking.done()
        await stand_still(engines, actors, 0)
        if has_begun:
            await stand_still(engines, actors, 0, STILL_S + 1)
        assert await asking == "one"
        assert len(actors[1].taken) == 1 and actors[0].aborted == ["r"]
        await actors[0].come_back()
        engines.on_outputs(0, outputs(6))
        engines.on_outputs(1, outputs(5, 6, ends=True))
        assert await tokens_of(mailbox) == [5, 6]

    play(scene, "one", "one")


def test_an_engine_that_was_told_off_is_not_asked_again() -> None:
    """The abort that it was sent may still be remembered there."""

    async def scene(engines: Engines, actors: list[Actor], mailbox: Mailbox) -> None:
        slow = Slow()
        actors[0].submit = slow
        asking = asyncio.create_task(engines.submit([asked("r")], mailbox))
        await settle()
        await stand_still(engines, actors, 0)
        await asking
        await actors[0].come_back()
        await actors[1].lose()
        with pytest.raises(EngineFailed, match="was lost"):
            await mailbox.take()
        assert len(slow.answers) == 1

    play(scene, "one", "one")


def test_a_submission_that_nobody_takes_is_refused_at_once() -> None:
    async def scene(engines: Engines, actors: list[Actor], mailbox: Mailbox) -> None:
        actors[0].submit = Slow()
        asking = asyncio.create_task(engines.submit([asked("r")], mailbox))
        await settle()
        await stand_still(engines, actors, 0)
        with pytest.raises(EngineUnavailable, match="No engine takes requests"):
            await asking
        assert actors[0].aborted == ["r"]

    play(scene, "one")
