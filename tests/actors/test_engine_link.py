"""A frontend's connection to an engine: whose its calls are, and how it ends, breaks or is silent.

Ray cancels with a request's task the calls that were made in its context.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from shoal.errors import WorkError
from shoal.inference import Limits, Request, SamplingParams
from shoal.inference.protocol import Output
from shoal_actors.engine import STILL_S, EngineFacts, EngineLink, LinkState
from shoal_actors.engine.awake import LOOK_S, AwakeClock
from shoal_actors.engine.lease import Leases
from tests.actors.scripted_actor import DEADLINE_S, Method, ScriptedActor, Slow, until

REQUEST = Request(id="a", prompt=(1,), params=SamplingParams())
FACTS = EngineFacts(
    limits=Limits(vocab_size=257, context_length=512, num_blocks=64, block_size=4),
    fingerprint="one",
    weights="w1",
    certificate={"passed": True},
)
_TASK: contextvars.ContextVar[str] = contextvars.ContextVar("task", default="nobody's")
"""Stands for the variable by which Ray knows whose call a call is."""


class _Noted:
    """A remote method that notes in whose context it is called."""

    def __init__(self, calls: list[tuple[str, str]], name: str, answer: object = None) -> None:
        self._calls = calls
        self._name = name
        self._answer = answer

    def remote(self, *args: Any) -> asyncio.Future[Any]:
        self._calls.append((self._name, _TASK.get()))
        return Method(lambda: self._answer).remote()


class _Actor(ScriptedActor):
    """Notes the calls that are made of it."""

    def __init__(self) -> None:
        super().__init__(FACTS)
        self.calls: list[tuple[str, str]] = []
        self.submit: Any = _Noted(self.calls, "submit")
        self.abort = _Noted(self.calls, "abort")
        self.pulse = _Noted(self.calls, "pulse", self.pulse_now())
        self.flush = _Noted(self.calls, "flush", True)


class _Owner:
    def __init__(self) -> None:
        self.lost: list[int] = []
        self.silent: list[float] = []

    def on_outputs(self, place: int, outputs: Sequence[Output]) -> None:
        """Nothing comes."""

    def on_lost(self, place: int, reason: str) -> None:
        self.lost.append(place)

    def on_silent(self, place: int, silent_s: float) -> None:
        self.silent.append(silent_s)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        (
            "submit",
            lambda link: link.submit([REQUEST]),
        ),
        ("abort", lambda link: _abort(link)),
        ("pulse", lambda link: link.fresh_pulse()),
    ],
)
def test_no_call_belongs_to_the_request_that_makes_it(
    name: str, call: Callable[[EngineLink], Any]
) -> None:
    actor = _Actor()

    async def serve() -> None:
        link = await _connected(actor, _Owner())
        actor.calls.clear()
        token = _TASK.set("the request's")
        await call(link)
        await asyncio.sleep(0)
        _TASK.reset(token)

    asyncio.run(serve())
    assert actor.calls == [(name, "nobody's")]


def test_who_leaves_ends_the_stream_and_has_the_journal_flushed() -> None:
    actor = _Actor()

    async def leave() -> None:
        await actor.link(0, actor.find, _Owner()).close()  # before it was ever connected
        assert not actor.calls and not actor.streams
        link = await _connected(actor, _Owner())
        assert not actor.streams[0].is_cancelled
        await link.close()
        assert actor.streams[0].is_cancelled

    asyncio.run(leave())
    assert [name for name, _ in actor.calls] == ["pulse", "flush"]


def test_a_stream_that_breaks_is_told_and_made_anew() -> None:
    actor, owner = _Actor(), _Owner()

    async def scene() -> None:
        link = await _connected(actor, owner)
        states = [link.state]
        await actor.lose()
        states.append(link.state)
        assert states == [LinkState.UP, LinkState.DOWN] and owner.lost == [0]
        with pytest.raises(WorkError, match="not connected"):
            await link.submit([REQUEST])
        actor.start_again()
        await until(lambda: link.state is LinkState.UP)
        assert [stream.is_cancelled for stream in actor.streams] == [True, False]

    asyncio.run(scene())


def test_silence_is_told_from_a_while_on_and_ends_submissions() -> None:
    owner, actor = _Owner(), _Actor()
    actor.submit = Slow()

    async def look() -> None:
        link = await _connected(actor, owner)
        submitting = asyncio.create_task(link.submit([REQUEST]))
        for actor.now, state in (
            (2.9, LinkState.UP),
            (4.9, LinkState.SILENT),
            (5.0, LinkState.SILENT),
            (5.5, LinkState.SILENT),
            (6.5, LinkState.SILENT),
        ):
            assert not submitting.done() or actor.now >= 5.5
            await asyncio.sleep(2 * LOOK_S)
            assert link.state is state
        assert owner.silent == [5.0, 6.5]  # once a second
        with pytest.raises(WorkError, match="no sign of life for 5 seconds"):
            await submitting
        await actor.come_back()
        await asyncio.sleep(2 * LOOK_S)
        assert link.state is LinkState.UP and len(owner.silent) == 2

    asyncio.run(look())


def test_who_stood_still_itself_finds_nobody_silent() -> None:
    now = [50.0]
    clock = AwakeClock(lambda: now[0])
    for _ in range(4):
        now[0] += LOOK_S
        clock()
    assert clock() == 4 * LOOK_S
    leases = Leases(clock)
    leases.grant("a")
    now[0] += 1000.0
    assert leases.take_lapsed() == [] and clock() < STILL_S - 1


async def _connected(actor: _Actor, owner: _Owner) -> EngineLink:
    link = actor.link(0, actor.find, owner)
    link.start()
    async with asyncio.timeout(DEADLINE_S):
        await link.connected.wait()
    return link


async def _abort(link: EngineLink) -> None:
    link.abort(["a"])
