"""The engines behind ``EngineClient``: Ray actors, one link to each, and who waits for what.

A request is a value that determines its answer, so where an engine is lost, another one with the
same fingerprint computes the answer again from the start, and what the client has already is left
out. That happens once for a request: one that was there at two losses may be their cause.

An engine that stands still is left in the same way, but it may come back. Until another one has
taken a request it stays where it is as well, and whatever either gives first is handed on.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.errors import ConfigError, Overloaded, ShoalError, WorkError
from shoal.inference.journal import JournalFull
from shoal.inference.protocol import Output
from shoal.inference.request import Request
from shoal_actors.engine import STILL_S, EngineLink, LinkState, Load, Router
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

PATIENCE_S = 60.0
"""What ``serve.stall_s`` is unless somebody says otherwise."""
_LOST = "The engine that computed the answer was lost."


@dataclass(eq=False, kw_only=True, slots=True)
class _Held:
    """A request that somebody waits for."""

    request: Request
    mailbox: Mailbox
    place: int
    """The engine that has it."""
    num_missing: int
    """Choices that have not ended."""
    is_taken: bool = False
    """Whether the engine that has it first has said so."""
    is_moving: bool = False
    """Whether another is sought."""
    has_moved: bool = False
    """Whether another than the first has it."""
    received: Counter[int] = field(default_factory=Counter)
    """Outputs handed on, by choice."""
    came: dict[int, Counter[int]]
    """Outputs that came, by choice, for each engine that may compute it: the one that has it unless
    that was lost, and the one that is asked to take it."""
    told_off: set[int]
    """Engines that were told to leave it alone before they had taken it. They may have that in mind
    for ever, so none of them is asked again."""

    def is_new(self, place: int, output: Output) -> bool:
        """Whether ``output``, the next of its choice there, was not handed on before; counts it."""
        came = self.came[place]
        came[output.choice] += 1
        if came[output.choice] <= self.received[output.choice]:
            return False
        self.received[output.choice] += 1
        return True


class Engines:
    """An ``EngineClient`` over the engine actors that ``finders`` find."""

    def __init__(
        self,
        name: str,
        created: int,
        finders: Sequence[Callable[[], Any]],
        weights: str = "",
        patience_s: float = PATIENCE_S,
    ) -> None:
        """A request waits ``patience_s`` for an engine that stands still, if no other takes it."""
        self._name = name
        self._created = created
        self._weights = weights
        self._patience_s = patience_s
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
        patience_s: float,
    ) -> Engines:
        """Connect to all engines; EngineUnavailable where one does not answer in time."""
        engines = cls(name, created, finders, weights, patience_s)
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
        given_up: set[int] = set()
        for place in self._ranked(requests[0], names):
            if fingerprint not in (None, promises[place]):
                continue
            held = self._hold(requests, mailbox, place, given_up)
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
                # It may only stand still: then it is to leave them alone when it comes back.
                self.abort([each.request.id for each in held])
                given_up.add(place)
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
            for place in () if held is None else held.came:
                by_place.setdefault(place, []).append(request_id)
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
            if held is None or place not in held.came:
                continue  # aborted meanwhile
            if not held.is_new(place, output):
                continue
            by_mailbox.setdefault(held.mailbox, []).append(output)
            held.num_missing -= output.finish_reason is not None
            if held.num_missing == 0:
                del self._held[output.request_id]
                for other in held.came.keys() - {place}:
                    self._links[other].abort([output.request_id])
        for mailbox, some in by_mailbox.items():
            mailbox.put(some)

    def on_lost(self, place: int, reason: str) -> None:
        """Have others compute what was under way there."""
        self._router.forget(place)
        for held in tuple(self._held.values()):
            was_there = held.came.pop(place, None) is not None
            if not was_there or not held.is_taken or held.is_moving:
                continue  # if it was there, whoever submits or moves it sees to it
            if held.has_moved:
                self._give_up(held, EngineFailed(_LOST))
            else:
                self._begin_move(held)

    def on_silent(self, place: int, silent_s: float) -> None:
        """Have others compute what waits there; what nobody takes waits on, but not for ever."""
        has_others, is_over = self._has_others(place), silent_s >= STILL_S + self._patience_s
        problem = f"The engine has given no sign of life for {silent_s:.0f} seconds."
        for held in [each for each in self._held.values() if each.place == place]:
            if not held.is_taken or held.is_moving:
                continue  # whoever submits or moves it sees to it
            if is_over:
                self._give_up(held, EngineUnavailable(problem))
            elif has_others and not held.has_moved:
                self._begin_move(held)

    def _taken(self, held: Sequence[_Held], names: Sequence[bytes], place: int) -> None:
        """Note that the engine at ``place`` has taken requests, be it lost since then."""
        self._router.note(names, place)
        for each in held:
            each.is_taken = True
            if place not in each.came:
                self._begin_move(each)

    def _begin_move(self, held: _Held) -> None:
        held.is_moving = True
        move = asyncio.create_task(self._move(held), name="move a request")
        self._moves.add(move)
        move.add_done_callback(self._moves.discard)

    async def _move(self, held: _Held) -> None:
        left, request_id = held.place, held.request.id
        names = self._names(held.request)
        for place in self._ranked(held.request, names):
            if self._held.get(request_id) is not held:
                return  # aborted or answered meanwhile: nobody would abort it there
            if place in held.told_off or not self._agree(left, place):
                continue
            if not await self._ask(held, place):
                continue
            if self._held.get(request_id) is not held:
                return  # and that one was told
            if place in held.came:
                self._router.note(names, place)
                held.place, held.has_moved = place, True
                if held.came.pop(left, None) is not None:
                    self._links[left].abort([request_id])  # it may come back
            break  # if it is not, that one was lost as well
        held.is_moving = False
        if self._held.get(request_id) is held and held.place not in held.came:
            self._give_up(held, EngineFailed(_LOST))

    async def _ask(self, held: _Held, place: int) -> bool:
        """Whether the engine at ``place`` goes on with what another one has, or had."""
        held.came[place] = Counter()
        try:
            await self._links[place].submit([held.request], moved_from=held.place)
        except (Overloaded, ConfigError, JournalFull) as error:
            problem: ShoalError = error
        except WorkError as error:
            problem = error
            self._links[place].abort([held.request.id])
            held.told_off.add(place)
        else:
            return True
        held.came.pop(place, None)
        if held.place not in held.came:  # else it is tried again
            logger.warning("a request could not move to engine %d: %s", place, problem)
        return False

    def _agree(self, left: int, place: int) -> bool:
        """Whether the engine at ``place`` may go on with what the one at ``left`` began."""
        facts = self._links[place].facts
        return place != left and facts is not None and facts.agrees_with(self._links[left].facts)

    def _has_others(self, left: int) -> bool:
        """Whether an engine that takes requests may go on with what is at ``left``."""
        return any(
            link.state is LinkState.UP and self._agree(left, link.place) for link in self._links
        )

    def _give_up(self, held: _Held, error: WorkError) -> None:
        held.mailbox.fail(error)
        self.abort([held.request.id])

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

    def _hold(
        self, requests: Sequence[Request], mailbox: Mailbox, place: int, given_up: set[int]
    ) -> list[_Held]:
        held = [
            _Held(
                request=request,
                mailbox=mailbox,
                place=place,
                num_missing=request.params.n,
                came={place: Counter()},
                told_off=set(given_up),
            )
            for request in requests
        ]
        self._held.update({each.request.id: each for each in held})
        return held

    def _release(self, held: Sequence[_Held]) -> None:
        for each in held:
            self._held.pop(each.request.id, None)

    def _load(self, link: EngineLink) -> int:
        """Choices under way there: ours by our own books, all others' by its last pulse."""
        own = sum(held.num_missing for held in self._held.values() if link.place in held.came)
        pulse = link.pulse
        reported = 0 if pulse is None else pulse.stats.running + pulse.stats.waiting
        return max(own, reported)
