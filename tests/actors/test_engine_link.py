"""Calls to an engine outlive the request that makes them: Ray cancels those of its context."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from shoal.inference import Request, SamplingParams
from shoal.inference.protocol import Output
from shoal_actors.engine import EngineLink

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


async def _abort(link: EngineLink) -> None:
    link.abort(["a"])
