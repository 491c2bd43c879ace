"""Which engine is asked first: the router's choice, by our own books and by what engines say."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.inference.request import Request
from shoal_actors.engine import EngineLink, LinkState, Load, Router
from shoal_deployments.engines.held import HeldRequests


class Ranking:
    """The engines at the ends of ``links``, in the order in which to ask them."""

    def __init__(self, links: Sequence[EngineLink], held: HeldRequests) -> None:
        self._links = links
        self._held = held
        self._router = Router()

    def names(self, request: Request) -> list[bytes]:
        """Names of the blocks of its prompt that an engine may have computed before."""
        return self._router.names(request.prompt, self._block_size)

    def places(self, request: Request, names: Sequence[bytes]) -> list[int]:
        """Engines that take requests, the best for a prompt of these blocks first."""
        loads = [
            Load(place=link.place, sequences=self._load(link))
            for link in self._links
            if link.state is LinkState.UP
        ]
        start = self._router.start(request.prompt, self._block_size)
        return self._router.ranked(names, loads, start)

    def note(self, names: Sequence[bytes], place: int) -> None:
        """Remember that the engine at ``place`` has taken a prompt of these blocks."""
        self._router.note(names, place)

    def forget(self, place: int) -> None:
        """The engine at ``place`` starts anew."""
        self._router.forget(place)

    @property
    def _block_size(self) -> int:
        return next(link.facts.limits.block_size for link in self._links if link.facts is not None)

    def _load(self, link: EngineLink) -> int:
        """Choices under way there: ours by our own books, all others' by its last pulse."""
        pulse = link.pulse
        reported = 0 if pulse is None else pulse.stats.running + pulse.stats.waiting
        return max(self._held.num_choices(link.place), reported)
