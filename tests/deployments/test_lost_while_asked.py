"""Engines that are lost while they are asked, and clients that leave just then."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from ray.exceptions import RayActorError

from shoal.errors import WorkError
from shoal.inference import Output, Request, SamplingParams
from shoal_deployments.engines import Engines
from shoal_deployments.mailbox import Mailbox
from tests.deployments.scripted_actors import PROMPT, Actor, connected, facts_of

REQUEST = Request(id="r0", prompt=PROMPT, params=SamplingParams(max_tokens=8))


class _Slow:
    """A remote method whose answers the test gives, one after the other."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self._answers: list[asyncio.Future[Any]] = []

    def remote(self, *arguments: object) -> asyncio.Future[Any]:
        self.calls.append(arguments)
        self._answers.append(asyncio.get_running_loop().create_future())
        return self._answers[-1]

    async def answer(self, result: object) -> None:
        """Give the newest call its answer, or its failure, and let the others go on."""
        future = self._answers[-1]
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)
        await _others()


async def _others() -> None:
    """Let all other tasks come as far as they can."""
    for _ in range(10):
        await asyncio.sleep(0)


def _first_of_three(
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[Engines, Sequence[_Slow], Sequence[_Slow]]:
    """Engines that are tried in order; what each is given to compute, and to abort."""
    actors = [Actor() for _ in range(3)]
    submits, aborts = [_Slow() for _ in actors], [_Slow() for _ in actors]
    for actor, submit, abort in zip(actors, submits, aborts, strict=True):
        monkeypatch.setattr(actor, "submit", submit)
        monkeypatch.setattr(actor, "abort", abort)
    engines = connected(monkeypatch, [facts_of("one") for _ in actors], actors)
    return engines, submits, aborts


def _lose_first(monkeypatch: pytest.MonkeyPatch, engines: Engines) -> None:
    monkeypatch.setattr(engines._links[0], "_actor", None)
    engines.on_lost(0, "killed")


def _outputs(*tokens: int) -> list[Output]:
    return [Output(request_id="r0", choice=0, token_ids=(token,)) for token in tokens]


@pytest.mark.parametrize("stream_breaks_first", [True, False])
def test_an_engine_lost_while_it_is_asked_has_the_next_one_asked_once(
    monkeypatch: pytest.MonkeyPatch, stream_breaks_first: bool
) -> None:
    async def ask() -> None:
        engines, submits, _ = _first_of_three(monkeypatch)
        mailbox = Mailbox(1000)
        asking = asyncio.create_task(engines.submit([REQUEST], mailbox))
        await _others()
        if stream_breaks_first:
            _lose_first(monkeypatch, engines)
            await _others()
            await submits[0].answer(RayActorError())
        else:
            await submits[0].answer(RayActorError())
            _lose_first(monkeypatch, engines)
            await _others()
        assert [len(submit.calls) for submit in submits] == [1, 1, 0]
        await submits[1].answer(None)
        assert await asking == "one"
        engines.on_outputs(1, _outputs(5))
        assert await mailbox.take() == _outputs(5)

    asyncio.run(ask())


@pytest.mark.parametrize("answer", [None, RayActorError()], ids=["late", "never"])
def test_what_an_engine_gave_before_it_was_lost_is_not_given_again(
    monkeypatch: pytest.MonkeyPatch, answer: object
) -> None:
    """The engine had taken the request, and its word of that comes late, or never."""

    async def ask() -> None:
        engines, submits, _ = _first_of_three(monkeypatch)
        mailbox = Mailbox(1000)
        asking = asyncio.create_task(engines.submit([REQUEST], mailbox))
        await _others()
        engines.on_outputs(0, _outputs(5, 6))
        _lose_first(monkeypatch, engines)
        await submits[0].answer(answer)
        assert await asking == "one"
        assert [len(submit.calls) for submit in submits] == [1, 1, 0]
        await submits[1].answer(None)
        engines.on_outputs(1, _outputs(5, 6, 7))
        assert await mailbox.take() == _outputs(5, 6, 7)

    asyncio.run(ask())


def test_a_client_that_leaves_as_its_engine_is_lost_moves_nowhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def ask() -> None:
        engines, submits, _ = _first_of_three(monkeypatch)
        asking = asyncio.create_task(engines.submit([REQUEST], Mailbox(1000)))
        await _others()
        await submits[0].answer(None)
        await asking
        _lose_first(monkeypatch, engines)
        engines.abort(["r0"])
        await _others()
        assert submits[1].calls == []

    asyncio.run(ask())


def test_a_client_that_leaves_during_a_move_is_aborted_there_and_goes_no_further(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def ask() -> None:
        engines, submits, aborts = _first_of_three(monkeypatch)
        asking = asyncio.create_task(engines.submit([REQUEST], Mailbox(1000)))
        await _others()
        await submits[0].answer(None)
        await asking
        _lose_first(monkeypatch, engines)
        await _others()
        engines.abort(["r0"])
        await _others()
        assert aborts[1].calls == [(["r0"],)]
        await submits[1].answer(WorkError("The engine was lost."))
        assert [len(submit.calls) for submit in submits] == [1, 1, 0]

    asyncio.run(ask())
