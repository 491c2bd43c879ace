"""Engines that are lost while they are asked, and clients that leave just then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
from ray.exceptions import RayActorError

from shoal.errors import WorkError
from shoal.inference import Output
from shoal_deployments.engines import Engines
from shoal_deployments.mailbox import Mailbox
from tests.deployments.scripted_actors import Actor, Slow, asked, lose, play, settle

REQUEST = asked("r0")

Scene = Callable[[Engines, Sequence[Slow], Sequence[Slow]], Coroutine[Any, Any, None]]


def _play(monkeypatch: pytest.MonkeyPatch, scene: Scene) -> None:
    """Three engines that are tried in order, what each is given to compute, and to abort."""

    async def whole(engines: Engines, actors: Sequence[Actor]) -> None:
        submits, aborts = [Slow() for _ in actors], [Slow() for _ in actors]
        for actor, submit, abort in zip(actors, submits, aborts, strict=True):
            monkeypatch.setattr(actor, "submit", submit)
            monkeypatch.setattr(actor, "abort", abort)
        await scene(engines, submits, aborts)

    play(monkeypatch, whole, "one", "one", "one")


def _outputs(*tokens: int) -> list[Output]:
    return [Output(request_id="r0", choice=0, token_ids=(token,)) for token in tokens]


@pytest.mark.parametrize("stream_breaks_first", [True, False])
def test_an_engine_lost_while_it_is_asked_has_the_next_one_asked_once(
    monkeypatch: pytest.MonkeyPatch, stream_breaks_first: bool
) -> None:
    async def scene(engines: Engines, submits: Sequence[Slow], aborts: Sequence[Slow]) -> None:
        mailbox = Mailbox(1000)
        asking = asyncio.create_task(engines.submit([REQUEST], mailbox))
        await settle()
        if stream_breaks_first:
            lose(engines, 0)
            await settle()
            await submits[0].answer(RayActorError())
        else:
            await submits[0].answer(RayActorError())
            lose(engines, 0)
            await settle()
        assert [len(submit.calls) for submit in submits] == [1, 1, 0]
        await submits[1].answer(None)
        assert await asking == "one"
        engines.on_outputs(1, _outputs(5))
        assert await mailbox.take() == _outputs(5)

    _play(monkeypatch, scene)


@pytest.mark.parametrize("answer", [None, RayActorError()], ids=["late", "never"])
def test_what_an_engine_gave_before_it_was_lost_is_not_given_again(
    monkeypatch: pytest.MonkeyPatch, answer: object
) -> None:
    """The engine had taken the request, and its word of that comes late, or never."""

    async def scene(engines: Engines, submits: Sequence[Slow], aborts: Sequence[Slow]) -> None:
        mailbox = Mailbox(1000)
        asking = asyncio.create_task(engines.submit([REQUEST], mailbox))
        await settle()
        engines.on_outputs(0, _outputs(5, 6))
        lose(engines, 0)
        await submits[0].answer(answer)
        assert await asking == "one"
        assert [len(submit.calls) for submit in submits] == [1, 1, 0]
        await submits[1].answer(None)
        engines.on_outputs(1, _outputs(5, 6, 7))
        assert await mailbox.take() == _outputs(5, 6, 7)

    _play(monkeypatch, scene)


@pytest.mark.parametrize("is_asked", [False, True])
def test_a_client_that_leaves_as_its_engine_is_lost_goes_no_further(
    monkeypatch: pytest.MonkeyPatch, is_asked: bool
) -> None:
    """It moves nowhere, or is aborted by the one that is asked already."""

    async def scene(engines: Engines, submits: Sequence[Slow], aborts: Sequence[Slow]) -> None:
        asking = asyncio.create_task(engines.submit([REQUEST], Mailbox(1000)))
        await settle()
        await submits[0].answer(None)
        await asking
        lose(engines, 0)
        if is_asked:
            await settle()
        engines.abort(["r0"])
        await settle()
        if is_asked:
            assert aborts[1].calls == [(["r0"],)]
            await submits[1].answer(WorkError("The engine was lost."))
        assert [len(submit.calls) for submit in submits] == [1, int(is_asked), 0]

    _play(monkeypatch, scene)
