"""Handles of engine actors without Ray, and a frontend's engines connected to them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from shoal.errors import ShoalError
from shoal.inference import Limits, Request, SamplingParams, Submission
from shoal_actors.engine import EngineFacts, Pulse, Router
from shoal_deployments.engines import Engines
from tests.actors.scripted_engine import ScriptedEngine

DEADLINE_S = 10.0

LIMITS = Limits(vocab_size=257, context_length=512, num_blocks=64, block_size=4)

WEIGHTS = "w1"
"""Mark of those that the frontend knows."""

PROMPT = next((token,) for token in range(257) if Router().start((token,), 4) % 12 == 0)
"""One that goes to the first of up to four idle engines."""


class _Method:
    """A remote method that gives what ``answer`` does, or nothing for ever."""

    def __init__(self, answer: Callable[..., object], hangs: bool = False) -> None:
        self._answer = answer
        self._hangs = hangs

    def remote(self, *arguments: Any) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if not self._hangs:
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


class Actor:
    """The handle of an engine that takes every request, unless it has a ``refusal``."""

    def __init__(self, hangs: bool = False) -> None:
        self.taken: list[Submission] = []
        self.aborted: list[str] = []
        self.refusal: ShoalError | None = None
        self.submit = _Method(self._submit)
        self.abort = _Method(self.aborted.extend)
        self.pulse = _Method(self._pulse, hangs)

    def _submit(self, submissions: Sequence[Submission]) -> ShoalError | None:
        if self.refusal is None:
            self.taken.extend(submissions)
        return self.refusal

    def _pulse(self) -> Pulse:
        moved = Counter(each.moved_from for each in self.taken if each.moved_from is not None)
        return Pulse(stats=ScriptedEngine().stats(), busy_s=0.0, moved_from=moved)


def facts_of(fingerprint: str, passed: bool = True, weights: str = WEIGHTS) -> EngineFacts:
    """What an engine with kernels of this fingerprint says of itself."""
    return EngineFacts(
        limits=LIMITS, fingerprint=fingerprint, weights=weights, certificate={"passed": passed}
    )


def connected(
    monkeypatch: pytest.MonkeyPatch, facts: Sequence[EngineFacts], actors: Sequence[Actor]
) -> Engines:
    """One frontend's view of ``actors``, which say ``facts`` of themselves."""
    engines = Engines("tiny", 0, [lambda: None for _ in facts], WEIGHTS)
    for link, fact, actor in zip(engines._links, facts, actors, strict=True):
        monkeypatch.setattr(link, "facts", fact)
        monkeypatch.setattr(link, "_actor", actor)
    engines._make_card()
    return engines


Scene = Callable[[Engines, Sequence[Actor]], Coroutine[Any, Any, None]]


def play(monkeypatch: pytest.MonkeyPatch, scene: Scene, *fingerprints: str) -> None:
    """Run ``scene`` with one frontend and an engine for each of ``fingerprints``."""

    async def run() -> None:
        actors = [Actor() for _ in fingerprints]
        engines = connected(monkeypatch, list(map(facts_of, fingerprints)), actors)
        async with asyncio.timeout(DEADLINE_S):
            await scene(engines, actors)

    asyncio.run(run())


def asked(name: str, prompt: Sequence[int] = PROMPT, n: int = 1) -> Request:
    """A request for up to 9 tokens."""
    return Request(id=name, prompt=tuple(prompt), params=SamplingParams(max_tokens=9, n=n, seed=1))


def lose(engines: Engines, place: int) -> None:
    """What the link at ``place`` does when its stream breaks."""
    engines._links[place]._actor = None
    engines.on_lost(place, "scripted")


async def settle() -> None:
    """Let everything happen that waits for nothing else."""
    for _ in range(20):
        await asyncio.sleep(0)
