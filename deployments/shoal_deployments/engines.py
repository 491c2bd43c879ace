"""The engines behind ``EngineClient``: Ray actors, one link to each, and who waits for what.

A request is a value that determines its answer, so where an engine is lost, another one with the
same fingerprint computes the answer again from the start, and what the client has already is left
out. That happens once for a request: one that was there at two losses may be their cause.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.errors import ConfigError, Overloaded, WorkError
from shoal.inference.journal import JournalFull
from shoal.inference.protocol import Output
from shoal.inference.request import Request
from shoal_actors.engine import EngineLink, LinkState, Load, Router
from shoal_deployments.engine_client import (
    EngineFailed,
    EngineUnavailable,
    ModelCard,
    ReplicaHealth,
    ReplicaStats,
    other_fingerprint,
)
from shoal_deployments.mailbox import Mailbox

logger = logging.getLogger(__name__)


@dataclass(eq=False, kw_only=True, slots=True)
class _Held:
    """A request that somebody waits for."""

    request: Request
    mailbox: Mailbox
    place: int
    """The engine that computes it."""
    num_missing: int
    """Choices that have not ended."""
    is_taken: bool = False
    """Whether the engine that has it first has said so."""
    is_lost: bool = False
    """Whether that engine was lost before it had said so."""
    has_moved: bool = False
    """Whether the engine that had it first was lost."""
    received: Counter[int] = field(default_factory=Counter)
    """Outputs handed on, by choice."""
    repeated: Counter[int] = field(default_factory=Counter)
    """Outputs still to come that were handed on before, by choice."""

    def is_new(self, output: Output) -> bool:
        """Whether ``output``, the next of its choice, was not handed on before; counts it."""
        if self.repeated[output.choice] > 0:
            self.repeated[output.choice] -= 1
            return False
        self.received[output.choice] += 1
        return True


class Engines:
    """An ``EngineClient`` over the engine actors that ``finders`` find."""

    def __init__(
        self, name: str, created: int, finders: Sequence[Callable[[], Any]], weights: str = ""
    ) -> None:
        self._name = name
        self._created = created
        self._weights = weights
        self._links = [EngineLink(place, find, self) for place, find in enumerate(finders)]
        self._held: dict[str, _Held] = {}
        self._card: ModelCard | None = None
        self._router = Router()
        self._moves: set[asyncio.Task[None]] = set()

    @classmethod
    async def connect(
        cls,
        finders: Sequence[Callable[[], Any]],
        *,
        name: str,
        created: int,
        weights: str,
        timeout_s: float,
    ) -> Engines:
        """Connect to all engines; EngineUnavailable where one does not answer in time."""
        engines = cls(name, created, finders, weights)
        for link in engines._links:
            link.start()
        try:
            async with asyncio.timeout(timeout_s):
                for link in engines._links:
                    await link.connected.wait()
        except TimeoutError:
            await engines.close()
            problem = f"Not all engines answered within {timeout_s:g} seconds."
            raise EngineUnavailable(problem) from None
        engines._make_card()
        return engines

    async def close(self) -> None:
        """Leave the engines, once their journals have all that came before."""
        await asyncio.gather(*(link.close() for link in self._links))

    @property
    def card(self) -> ModelCard:
        """The model."""
        assert self._card is not None, "connect makes it"
        return self._card

    async def submit(
        self, requests: Sequence[Request], mailbox: Mailbox, fingerprint: str | None = None
    ) -> str | None:
        """See ``EngineClient``; the requests of one client go to one engine."""
        names = self._names(requests[0])
        promises = [None if link.facts is None else link.facts.promise for link in self._links]
        if fingerprint is not None and fingerprint not in promises:
            raise other_fingerprint(fingerprint)
        is_full, problem = False, "No engine takes requests at the moment."
        for place in self._ranked(requests[0], names):
            if fingerprint not in (None, promises[place]):
                continue
            held = self._hold(requests, mailbox, place)
            try:
                await self._links[place].submit(requests)
            except Overloaded:
                is_full = True
            except ConfigError:
                self._release(held)
                raise
            except JournalFull as error:
                problem = str(error)
            except WorkError as error:
                logger.warning("%s", error)
                # It may have begun before it was lost.
                if any(each.received for each in held):
                    self._taken(held, names, place)
                    return promises[place]
            else:
                self._taken(held, names, place)
                return promises[place]
            self._release(held)
        if is_full:
            raise Overloaded("The queues of all engines are full.")
        raise EngineUnavailable(problem)

    def abort(self, request_ids: Sequence[str]) -> None:
        """See ``EngineClient``."""
        by_place: dict[int, list[str]] = {}
        for request_id in request_ids:
            held = self._held.pop(request_id, None)
            if held is not None:
                by_place.setdefault(held.place, []).append(request_id)
        for place, ids in by_place.items():
            self._links[place].abort(ids)

    async def stats(self) -> Sequence[ReplicaStats]:
        """See ``EngineClient``."""
        pulses = await asyncio.gather(*(link.fresh_pulse() for link in self._links))
        moved: Counter[int] = Counter()
        for pulse in pulses:
            moved.update({} if pulse is None else pulse.moved_from)
        found = [
            ReplicaStats(
                replica=str(link.place),
                stats=pulse.stats,
                busy_s=pulse.busy_s,
                migrated=moved[link.place],
                certificate=link.facts.certificate,
                journal=pulse.journal,
            )
            for link, pulse in zip(self._links, pulses, strict=True)
            if pulse is not None and link.facts is not None
        ]
        if not found:
            raise EngineUnavailable("No engine answers.")
        return found

    async def health(self) -> Sequence[ReplicaHealth]:
        """See ``EngineClient``."""
        return [
            ReplicaHealth(
                replica=str(link.place),
                progresses=link.state is LinkState.UP,
                detail="" if link.state is LinkState.UP else f"The engine is {link.state.value}.",
            )
            for link in self._links
        ]

    def on_outputs(self, place: int, outputs: Sequence[Output]) -> None:
        """Hand the outputs of a step to those who wait for them."""
        by_mailbox: dict[Mailbox, list[Output]] = {}
        for output in outputs:
            held = self._held.get(output.request_id)
            if held is None or held.place != place:
                continue  # aborted meanwhile
            if not held.is_new(output):
                continue
            by_mailbox.setdefault(held.mailbox, []).append(output)
            held.num_missing -= output.finish_reason is not None
            if held.num_missing == 0:
                del self._held[output.request_id]
        for mailbox, some in by_mailbox.items():
            mailbox.put(some)

    def on_lost(self, place: int, reason: str) -> None:
        """Have others compute what was under way there."""
        self._router.forget(place)
        for held in [each for each in self._held.values() if each.place == place]:
            if held.has_moved:
                self._give_up(held)
            elif held.is_taken:
                self._begin_move(held)
            else:
                held.is_lost = True  # whoever submits it sees to it

    def _taken(self, held: Sequence[_Held], names: Sequence[bytes], place: int) -> None:
        """Note that the engine at ``place`` has taken requests, be it lost since then."""
        self._router.note(names, place)
        for each in held:
            each.is_taken = True
            if each.is_lost:
                self._begin_move(each)

    def _begin_move(self, held: _Held) -> None:
        held.has_moved = True
        move = asyncio.create_task(self._move(held), name="move a request")
        self._moves.add(move)
        move.add_done_callback(self._moves.discard)

    async def _move(self, held: _Held) -> None:
        lost = self._links[held.place]
        names = self._names(held.request)
        for place in self._ranked(held.request, names):
            if self._held.get(held.request.id) is not held:
                return  # aborted meanwhile: nobody would abort it there
            link = self._links[place]
            if link is lost or link.facts is None or not link.facts.agrees_with(lost.facts):
                continue
            held.place, held.repeated = place, held.received.copy()
            try:
                await link.submit([held.request], moved_from=lost.place)
            except (Overloaded, ConfigError, WorkError) as error:
                logger.warning("a request could not move to engine %d: %s", place, error)
                continue
            self._router.note(names, place)
            return
        self._give_up(held)

    def _give_up(self, held: _Held) -> None:
        held.mailbox.fail(EngineFailed("The engine that computed the answer was lost."))
        self._release([held])

    def _names(self, request: Request) -> list[bytes]:
        return self._router.names(request.prompt, self.card.limits.block_size)

    def _ranked(self, request: Request, names: Sequence[bytes]) -> list[int]:
        """Engines that take requests, the best for this prompt first."""
        loads = [
            Load(place=link.place, sequences=self._load(link))
            for link in self._links
            if link.state is LinkState.UP
        ]
        start = self._router.start(request.prompt, self.card.limits.block_size)
        return self._router.ranked(names, loads, start)

    def _make_card(self) -> None:
        facts = [link.facts for link in self._links if link.facts is not None]
        self._card = ModelCard(
            name=self._name,
            created=self._created,
            weights=self._weights,
            # What the one with the least memory takes, any of them does.
            limits=min((each.limits for each in facts), key=lambda limits: limits.num_blocks),
        )

    def _hold(self, requests: Sequence[Request], mailbox: Mailbox, place: int) -> list[_Held]:
        held = [
            _Held(request=request, mailbox=mailbox, place=place, num_missing=request.params.n)
            for request in requests
        ]
        self._held.update({each.request.id: each for each in held})
        return held

    def _release(self, held: Sequence[_Held]) -> None:
        for each in held:
            self._held.pop(each.request.id, None)

    def _load(self, link: EngineLink) -> int:
        """Choices under way there: ours by our own books, all others' by its last pulse."""
        own = sum(held.num_missing for held in self._held.values() if held.place == link.place)
        pulse = link.pulse
        reported = 0 if pulse is None else pulse.stats.running + pulse.stats.waiting
        return max(own, reported)
