"""An ``EngineClient`` over engine actors.

submit ── ranking: which first ──> link ──> actor
client <── mailbox <── held: who waits ── link <── one list of outputs a step
                        moving: another engine, where one is lost or stands still
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from shoal.errors import ConfigError, Overloaded, WorkError
from shoal.inference.journal import JournalFull
from shoal.inference.protocol import Output
from shoal.inference.request import Request
from shoal_actors.engine import EngineLink, LinkState
from shoal_deployments.engine_client import (
    EngineUnavailable,
    ModelCard,
    ReplicaHealth,
    ReplicaStats,
    other_fingerprint,
)
from shoal_deployments.engines.held import Held, HeldRequests, IdsByPlace
from shoal_deployments.engines.moving import Mover
from shoal_deployments.engines.ranking import Ranking
from shoal_deployments.mailbox import Mailbox

logger = logging.getLogger(__name__)

_OTHER_WEIGHTS = (
    "The model's folder was changed while it was served: the engine has other weights than this "
    "frontend knows. Start the server anew."
)


class Engines:
    """An ``EngineClient`` over the engine actors that ``finders`` find."""

    def __init__(
        self,
        name: str,
        created: int,
        finders: Sequence[Callable[[], Any]],
        weights: str,
        patience_s: float,
        link: Callable[..., EngineLink],
    ) -> None:
        """See ``connect``, which makes it of use."""
        self._name = name
        self._created = created
        self._weights = weights
        self._links = [link(place, find, self) for place, find in enumerate(finders)]
        self._held = HeldRequests()
        self._ranking = Ranking(self._links, self._held)
        self._mover = Mover(self._links, self._held, self._ranking, self.abort, patience_s)
        self._card: ModelCard | None = None

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
        link: Callable[..., EngineLink] = EngineLink,
    ) -> Engines:
        """Connect to all engines; EngineUnavailable where one does not answer in time.

        ``patience_s``: see ``Mover``. ``link`` makes a link, given its place, finder and owner.
        """
        engines = cls(name, created, finders, weights, patience_s, link)
        for each in engines._links:
            each.start()
        try:
            async with asyncio.timeout(timeout_s):
                for each in engines._links:
                    await each.connected.wait()
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
        promises = [self._promise(link) for link in self._links]
        if fingerprint is not None and fingerprint not in promises:
            raise other_fingerprint(fingerprint)
        is_full, problem = False, "No engine takes requests at the moment."
        refusal: ConfigError | None = None
        given_up: set[int] = set()
        names = self._ranking.names(requests[0])
        for place in self._ranking.places(requests[0], names):
            if fingerprint not in (None, promises[place]):
                continue
            held = self._held.hold(requests, mailbox, place, given_up)
            try:
                await self._links[place].submit(requests)
            except Overloaded:
                is_full = True
            except ConfigError as error:
                # Another may take it: where memory was scarce, an engine has a smaller pool.
                refusal = error
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
            self._forget(held)
        if is_full:
            raise Overloaded("The queues of all engines are full.")
        if refusal is not None:
            raise refusal
        raise EngineUnavailable(problem)

    def abort(self, request_ids: Sequence[str]) -> None:
        """See ``EngineClient``."""
        self._tell_to_leave(self._held.drop(request_ids))

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
                detail=self._detail(link),
            )
            for link in self._links
        ]

    def on_outputs(self, place: int, outputs: Sequence[Output]) -> None:
        """See ``LinkOwner``."""
        self._tell_to_leave(self._held.hand_on(place, outputs))

    def on_lost(self, place: int, reason: str) -> None:
        """See ``LinkOwner``."""
        self._ranking.forget(place)
        self._mover.on_lost(place)

    def on_silent(self, place: int, silent_s: float) -> None:
        """See ``LinkOwner``."""
        self._mover.on_silent(place, silent_s)

    def _promise(self, link: EngineLink) -> str | None:
        """The fingerprint whose bits are this model's there; None where nothing is promised."""
        facts = link.facts
        return None if facts is None or facts.weights != self._weights else facts.promise

    def _detail(self, link: EngineLink) -> str:
        """What is wrong with an engine, for a person; empty where nothing is."""
        if link.state is not LinkState.UP:
            return f"The engine is {link.state.value}."
        if link.facts is not None and link.facts.weights != self._weights:
            return _OTHER_WEIGHTS
        return ""

    def _taken(self, held: Sequence[Held], names: Sequence[bytes], place: int) -> None:
        """Note that the engine at ``place`` has taken requests, be it lost since then."""
        self._ranking.note(names, place)
        for each in held:
            each.is_taken = True
            if place not in each.came:
                self._mover.begin(each)

    def _forget(self, held: Sequence[Held]) -> None:
        """Wait no more for what an engine has refused."""
        self._held.drop([each.request.id for each in held])

    def _tell_to_leave(self, ids: IdsByPlace) -> None:
        for place, some in ids.items():
            self._links[place].abort(some)

    def _make_card(self) -> None:
        facts = [link.facts for link in self._links if link.facts is not None]
        self._card = ModelCard(
            name=self._name,
            created=self._created,
            weights=self._weights,
            # What the one with the least memory takes, any of them does.
            limits=min((each.limits for each in facts), key=lambda limits: limits.num_blocks),
        )
