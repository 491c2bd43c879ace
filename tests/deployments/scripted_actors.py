"""Handles of engine actors without Ray, and a frontend's engines connected to them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from shoal.errors import ShoalError
from shoal.inference import Limits, Request, SamplingParams, Submission
from shoal_actors.engine import EngineFacts, EngineLink, Pulse, Router
from shoal_deployments.engines import PATIENCE_S, Engines
from tests.actors.scripted_actor import DEADLINE_S, Method, ScriptedActor
from tests.actors.scripted_engine import ScriptedEngine

LIMITS = Limits(vocab_size=257, context_length=512, num_blocks=64, block_size=4)

WEIGHTS = "w1"
"""Mark of those that the frontend knows."""

PROMPT = next((token,) for token in range(257) if Router().start((token,), 4) % 12 == 0)
"""One that goes to the first of up to four idle engines."""


def facts_of(fingerprint: str, passed: bool = True, weights: str = WEIGHTS) -> EngineFacts:
    """What an engine with kernels of this fingerprint says of itself."""
    return EngineFacts(
        limits=LIMITS, fingerprint=fingerprint, weights=weights, certificate={"passed": passed}
    )


class Actor(ScriptedActor):
    """The handle of an engine that takes every request, unless it has a ``refusal``."""

    def __init__(self, facts: EngineFacts | None = None) -> None:
        super().__init__(facts or facts_of("one"))
        self.taken: list[Submission] = []
        self.aborted: list[str] = []
        self.refusal: ShoalError | None = None
        # A test may put others in their places.
        self.submit: Any = Method(self._submit)
        self.abort: Any = Method(self.aborted.extend)
        self.pulse: Any = Method(self.pulse_now)

    def pulse_now(self) -> Pulse:
        moved = Counter(each.moved_from for each in self.taken if each.moved_from is not None)
        return Pulse(stats=ScriptedEngine().stats(), busy_s=0.0, moved_from=moved)

    def _submit(self, submissions: Sequence[Submission]) -> ShoalError | None:
        if self.refusal is None:
            self.taken.extend(submissions)
        return self.refusal


async def connected(actors: Sequence[Actor]) -> Engines:
    """One frontend's view of ``actors``; one that is put in another's place is found there."""

    def find(place: int) -> ScriptedActor:
        return actors[place].find()

    def link(place: int, find: Callable[[], Any], owner: Engines) -> EngineLink:
        return actors[place].link(place, find, owner)

    return await Engines.connect(
        [partial(find, place) for place in range(len(actors))],
        name="tiny",
        created=0,
        weights=WEIGHTS,
        timeout_s=DEADLINE_S,
        patience_s=PATIENCE_S,
        link=link,
    )


Scene = Callable[[Engines, list[Actor]], Coroutine[Any, Any, None]]


def play(scene: Scene, *fingerprints: str) -> None:
    """Run ``scene`` with one frontend and an engine for each of ``fingerprints``."""

    async def run() -> None:
        actors = [Actor(facts_of(each)) for each in fingerprints]
        engines = await connected(actors)
        async with asyncio.timeout(DEADLINE_S):
            await scene(engines, actors)

    asyncio.run(run())


def asked(name: str, prompt: Sequence[int] = PROMPT, n: int = 1) -> Request:
    """A request for up to 9 tokens."""
    return Request(id=name, prompt=tuple(prompt), params=SamplingParams(max_tokens=9, n=n, seed=1))
