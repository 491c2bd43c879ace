"""Engines that are lost while they are asked, and clients that leave just then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from ray.exceptions import RayActorError

from shoal.errors import WorkError
from shoal.inference import Output
from shoal_deployments.engines import Engines
from shoal_deployments.mailbox import Mailbox
from tests.actors.scripted_actor import Slow, settle
from tests.deployments.scripted_actors import Actor, asked, play

REQUEST = asked("r0")

Scene = Callable[[Engines, list[Actor]], Coroutine[Any, Any, None]]


def _play(scene: Scene) -> None:
    """Three engines that are tried in order, whose answers the test gives."""

    async def whole(engines: Engines, actors: list[Actor]) -> None:
        for actor in actors:
            actor.submit, actor.abort = Slow(), Slow()
        await scene(engines, actors)

    play(whole, "one", "one", "one")


def _outputs(*tokens: int) -> list[Output]:
    return [Output(request_id="r0", choice=0, token_ids=(token,)) for token in tokens]


@pytest.mark.parametrize("stream_breaks_first", [True, False])
def test_an_engine_lost_while_it_is_asked_has_the_next_one_asked_once(
    stream_breaks_first: bool,
) -> None:
    async def scene(engines: Engines, actors: list[Actor]) -> None:
        mailbox = Mailbox(1000)
        asking = asyncio.create_task(engines.submit([REQUEST], mailbox))
        await settle()
        if stream_breaks_first:
            await actors[0].lose()
            await settle()
            await actors[0].submit.answer(RayActorError())
        else:
            await actors[0].submit.answer(RayActorError())
            await actors[0].lose()
            await settle()
        assert [len(actor.submit.calls) for actor in actors] == [1, 1, 0]
        await actors[1].submit.answer(None)
        assert await asking == "one"
        engines.on_outputs(1, _outputs(5))
        assert await mailbox.take() == _outputs(5)

    _play(scene)


@pytest.mark.parametrize("answer", [None, RayActorError()], ids=["late", "never"])
def test_what_an_engine_gave_before_it_was_lost_is_not_given_again(answer: object) -> None:
    """The engine had taken the request, and its word of that comes late, or never."""

    async def scene(engines: Engines, actors: list[Actor]) -> None:
        mailbox = Mailbox(1000)
        asking = asyncio.create_task(engines.submit([REQUEST], mailbox))
        await settle()
        engines.on_outputs(0, _outputs(5, 6))
        await actors[0].lose()
        await actors[0].submit.answer(answer)
        assert await asking == "one"
        assert [len(actor.submit.calls) for actor in actors] == [1, 1, 0]
        await actors[1].submit.answer(None)
        engines.on_outputs(1, _outputs(5, 6, 7))
        assert await mailbox.take() == _outputs(5, 6, 7)

    _play(scene)


@pytest.mark.parametrize("is_asked", [False, True])
def test_a_client_that_leaves_as_its_engine_is_lost_goes_no_further(is_asked: bool) -> None:
    """It moves nowhere, or is aborted by the one that is asked already."""

    async def scene(engines: Engines, actors: list[Actor]) -> None:
        asking = asyncio.create_task(engines.submit([REQUEST], Mailbox(1000)))
        await settle()
        await actors[0].submit.answer(None)
        await asking
        await actors[0].lose()
        if is_asked:
            await settle()
        engines.abort(["r0"])
        await settle()
        if is_asked:
            assert actors[1].abort.calls == [(["r0"],)]
            await actors[1].submit.answer(WorkError("The engine was lost."))
        assert [len(actor.submit.calls) for actor in actors] == [1, int(is_asked), 0]

    _play(scene)
