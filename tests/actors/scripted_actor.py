"""The handle of an engine's actor without Ray: what a link calls, and the stream that it reads."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ray.exceptions import RayActorError

from shoal.inference.protocol import Output
from shoal_actors.engine import EngineFacts, EngineLink, Pulse
from tests.actors.scripted_engine import ScriptedEngine

DEADLINE_S = 20.0


class Method:
    """A remote method that gives what ``answer`` does."""

    def __init__(self, answer: Callable[..., object]) -> None:
        self._answer = answer

    def remote(self, *arguments: Any) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        future.set_result(self._answer(*arguments))
        return future


class Slow:
    """A remote method whose calls the test answers, or nobody."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.answers: list[asyncio.Future[Any]] = []

    def remote(self, *arguments: object) -> asyncio.Future[Any]:
        self.calls.append(arguments)
        self.answers.append(asyncio.get_running_loop().create_future())
        return self.answers[-1]

    async def answer(self, result: object) -> None:
        """Give the newest call its answer, or its failure, and let what follows happen."""
        future = self.answers[-1]
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)
        await settle()


class Stream:
    """What a link reads: nothing after the first word, until it breaks."""

    def __init__(self) -> None:
        self.is_cancelled = False
        self._items: asyncio.Queue[Sequence[Output] | Exception] = asyncio.Queue()
        self._items.put_nowait(())

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Awaitable[Sequence[Output]]:
        return _given(await self._items.get())

    def break_off(self) -> None:
        """What Ray does when the actor is gone."""
        self._items.put_nowait(RayActorError())

    def cancel(self) -> None:
        """Note that it is not read any more."""
        self.is_cancelled = True


async def _given(item: Sequence[Output] | Exception) -> Sequence[Output]:
    if isinstance(item, Exception):
        raise item
    return item


class _Outputs:
    def __init__(self, streams: list[Stream]) -> None:
        self._streams = streams

    def options(self, num_returns: str) -> _Outputs:
        assert num_returns == "streaming"
        return self

    def remote(self, frontend: str) -> Stream:
        self._streams.append(Stream())
        return self._streams[-1]


class _Renewals:
    """Leases are renewed when the test says so."""

    def __init__(self, pulse: Callable[[], Pulse]) -> None:
        self.one = asyncio.Event()
        self._pulse = pulse

    async def remote(self, frontend: str) -> Pulse:
        await self.one.wait()
        self.one.clear()
        return self._pulse()


class ScriptedActor:
    """An engine that says ``facts`` of itself; other methods are the test's own.

    ``now`` is the time by the clock of a link to it, which goes as the test says.
    """

    def __init__(self, facts: EngineFacts) -> None:
        self.now = 0.0
        self.heard = 0.0
        """When its last sign of life came."""
        self.streams: list[Stream] = []
        self.facts = Method(lambda: facts)
        self.outputs = _Outputs(self.streams)
        self.renew = _Renewals(self._renewed)
        self._is_lost = False

    def link(self, place: int, find: Callable[[], Any], owner: Any) -> EngineLink:
        """A link that finds it, with its clock."""
        return EngineLink(place, find, owner, clock=lambda: self.now, cancel=Stream.cancel)

    def find(self) -> ScriptedActor:
        """What a link calls for the handle."""
        if self._is_lost:
            raise ValueError("There is no actor of this name.")
        return self

    async def lose(self) -> None:
        """Have its streams break; what that has begun is about to happen."""
        self._is_lost = True
        for stream in self.streams:
            stream.break_off()
        await asyncio.sleep(0)

    def start_again(self) -> None:
        """Let it be found from now on."""
        self._is_lost = False

    async def come_back(self) -> None:
        """Give a sign of life."""
        self.renew.one.set()
        await until(lambda: not self.renew.one.is_set())  # it is asked for one a second
        await settle()

    def pulse_now(self) -> Pulse:
        """What it says of itself."""
        return Pulse(stats=ScriptedEngine().stats(), busy_s=0.0)

    def _renewed(self) -> Pulse:
        self.heard = self.now
        return self.pulse_now()


async def until(holds: Callable[[], bool]) -> None:
    """Wait for ``holds()``."""
    for _ in range(round(DEADLINE_S / 0.01)):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come to hold")


async def settle() -> None:
    """Let everything happen that waits for nothing else."""
    for _ in range(20):
        await asyncio.sleep(0)
