"""Calls to an engine outlive the request that makes them: Ray cancels those of its context."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from shoal.errors import WorkError
from shoal.inference import Request, SamplingParams
from shoal.inference.protocol import Output
from shoal_actors.engine import STILL_S, EngineLink, LinkState
from shoal_actors.engine.awake import LOOK_S, AwakeClock
from shoal_actors.engine.lease import Leases

REQUEST = Request(id="a", prompt=(1,), params=SamplingParams())
_TASK: contextvars.ContextVar[str] = contextvars.ContextVar("task", default="nobody's")
"""Stands for the variable by which Ray knows whose call a call is."""


class _Method:
    """A remote method that notes in whose context it is called."""

    def __init__(self, calls: list[tuple[str, str]], name: str) -> None:
        self._calls = calls
        self._name = name

    def remote(self, *args: Any) -> asyncio.Future[None]:
        self._calls.append((self._name, _TASK.get()))
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        answer.set_result(None)
        return answer


class _Never:
    """A remote method that never answers."""

    def remote(self, *args: Any) -> asyncio.Future[None]:
        return asyncio.get_running_loop().create_future()


class _Actor:
    """An engine's handle."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.submit = _Method(self.calls, "submit")
        self.abort = _Method(self.calls, "abort")
        self.pulse = _Method(self.calls, "pulse")
        self.flush = _Method(self.calls, "flush")


class _Owner:
    def on_outputs(self, place: int, outputs: Sequence[Output]) -> None:
        """Nothing comes."""

    def on_lost(self, place: int, reason: str) -> None:
        """Nothing is lost."""

    def __init__(self) -> None:
        self.silent: list[float] = []

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
    name: str, call: Callable[[EngineLink], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = _Actor()

    async def serve() -> None:
        link = EngineLink(0, lambda: actor, _Owner())
        monkeypatch.setattr(link, "_actor", actor)  # connected
        token = _TASK.set("the request's")
        await call(link)
        await asyncio.sleep(0)
        _TASK.reset(token)

    asyncio.run(serve())
    assert actor.calls == [(name, "nobody's")]


def test_who_leaves_has_the_journal_flushed(monkeypatch: pytest.MonkeyPatch) -> None:
    actor = _Actor()

    async def leave() -> None:
        link = EngineLink(0, lambda: actor, _Owner())
        await link.close()  # before it was ever connected
        monkeypatch.setattr(link, "_actor", actor)
        await link.close()

    asyncio.run(leave())
    assert [name for name, _ in actor.calls] == ["flush"]


def test_silence_is_told_from_a_while_on_and_ends_submissions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, owner, actor = [100.0], _Owner(), _Actor()
    monkeypatch.setattr(actor, "submit", _Never())

    async def look() -> None:
        link = EngineLink(0, lambda: actor, owner, clock=lambda: now[0])
        monkeypatch.setattr(link, "_actor", actor)  # connected
        monkeypatch.setattr(link, "_heard", 100.0)
        watching = asyncio.create_task(link._watch())
        submitting = asyncio.create_task(link.submit([REQUEST]))
        for now[0], state in (
            (102.9, LinkState.UP),
            (104.9, LinkState.SILENT),
            (105.0, LinkState.SILENT),
            (105.5, LinkState.SILENT),
            (106.5, LinkState.SILENT),
        ):
            assert not submitting.done() or now[0] >= 105.5
            await asyncio.sleep(2 * LOOK_S)
            assert link.state is state
        assert owner.silent == [5.0, 6.5]  # once a second
        with pytest.raises(WorkError, match="no sign of life for 5 seconds"):
            await submitting
        link._heard = 106.5  # a pulse
        await asyncio.sleep(2 * LOOK_S)
        assert link.state is LinkState.UP and len(owner.silent) == 2
        watching.cancel()

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


async def _abort(link: EngineLink) -> None:
    link.abort(["a"])
