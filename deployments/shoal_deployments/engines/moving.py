"""What becomes of requests whose engine is lost or stands still: another one goes on with them.

A request is a value that determines its answer, so where an engine is lost, another one with the
same fingerprint computes the answer again from the start, and what the client has already is left
out. That happens once for a request: one that was there at two losses may be their cause.

An engine that stands still is left in the same way, but it may come back. Until another one has
taken a request it stays where it is as well, and whatever either gives first is handed on; where
one of the two fails at it, the other goes on.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence

from shoal.errors import ConfigError, Overloaded, ShoalError, WorkError
from shoal.inference.journal import JournalFull
from shoal_actors.engine import STILL_S, EngineLink, LinkState
from shoal_deployments.engine_client import EngineFailed, EngineUnavailable
from shoal_deployments.engines.held import Held, HeldRequests
from shoal_deployments.engines.ranking import Ranking

logger = logging.getLogger(__name__)

PATIENCE_S = 60.0
"""What ``serve.stall_s`` is unless somebody says otherwise."""
_LOST = "The engine that computed the answer was lost."


class Mover:
    """Finds other engines for what is ``held``; all on one event loop."""

    def __init__(
        self,
        links: Sequence[EngineLink],
        held: HeldRequests,
        ranking: Ranking,
        abort: Callable[[Sequence[str]], None],
        patience_s: float,
    ) -> None:
        """``abort`` gives up requests. One waits ``patience_s`` for an engine that stands still, if
        no other takes it."""
        self._links = links
        self._held = held
        self._ranking = ranking
        self._abort = abort
        self._patience_s = patience_s
        self._moves: set[asyncio.Task[None]] = set()

    def on_lost(self, place: int) -> None:
        """Have others compute what was under way at ``place``."""
        for held in tuple(self._held.by_id.values()):
            was_there = held.came.pop(place, None) is not None
            if not was_there or not held.is_taken or held.is_moving:
                continue  # if it was there, whoever submits or moves it sees to it
            if held.has_moved:
                self._give_up(held, EngineFailed(_LOST))
            else:
                self.begin(held)

    def on_silent(self, place: int, silent_s: float) -> None:
        """Have others compute what waits there; what nobody takes waits on, but not for ever."""
        has_others, is_over = self._has_others(place), silent_s >= STILL_S + self._patience_s
        problem = f"The engine has given no sign of life for {silent_s:.0f} seconds."
        for held in [each for each in self._held.by_id.values() if each.place == place]:
            if not held.is_taken or held.is_moving:
                continue  # whoever submits or moves it sees to it
            if is_over:
                self._give_up(held, EngineUnavailable(problem))
            elif has_others and not held.has_moved:
                self.begin(held)

    def begin(self, held: Held) -> None:
        """Move a request in a task of its own."""
        held.is_moving = True
        move = asyncio.create_task(self._move(held), name="move a request")
        self._moves.add(move)
        move.add_done_callback(self._moves.discard)

    async def _move(self, held: Held) -> None:
        left, request_id = held.place, held.request.id
        names = self._ranking.names(held.request)
        for place in self._ranking.places(held.request, names):
            if not self._held.is_wanted(held):
                return  # aborted or answered meanwhile: nobody would abort it there
            if place in held.told_off or not self._agree(left, place):
                continue
            if not await self._ask(held, place):
                continue
            if not self._held.is_wanted(held):
                return  # and that one was told
            if place in held.came:
                self._ranking.note(names, place)
                held.place, held.has_moved = place, True
                if held.came.pop(left, None) is not None:
                    self._links[left].abort([request_id])  # it may come back
            break  # if it is not, that one was lost as well
        held.is_moving = False
        if self._held.is_wanted(held) and held.place not in held.came:
            self._give_up(held, EngineFailed(held.failure or _LOST))

    async def _ask(self, held: Held, place: int) -> bool:
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

    def _give_up(self, held: Held, error: WorkError) -> None:
        held.mailbox.fail(error)
        self._abort([held.request.id])
