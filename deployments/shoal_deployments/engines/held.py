"""The requests that clients of one frontend wait for, and what has come for each of them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from shoal.inference.protocol import Output
from shoal.inference.request import Request
from shoal_deployments.mailbox import Mailbox

logger = logging.getLogger(__name__)

_OTHER_END = (
    "The engine that computed the answer was lost, and the one that went on with it ended it "
    "before the place it had reached."
)

IdsByPlace = dict[int, list[str]]
"""Ids of requests, by the place of an engine that has them."""


@dataclass(eq=False, kw_only=True, slots=True)
class Held:
    """A request that somebody waits for."""

    request: Request
    mailbox: Mailbox
    place: int
    """The engine that has it."""
    missing: set[int]
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
    """Engines that failed at it, or were told to leave it alone before they had taken it. They may
    have that in mind for ever, so none of them is asked again."""
    failure: str | None = None
    """What failed where another engine had it as well."""

    def news(self, place: int, output: Output) -> Output | None:
        """What ``output``, the next of its choice there, tells that was not told before; counts it.

        The end of a choice that has not ended is news wherever it comes: nothing follows it. One
        that comes where only a repeat was due is no end of this answer, so it becomes an error.
        """
        came = self.came[place]
        came[output.choice] += 1
        if output.choice not in self.missing:
            return None
        if came[output.choice] > self.received[output.choice] or output.finish_reason == "error":
            return output
        if output.finish_reason is None:
            return None
        return Output(
            request_id=output.request_id,
            choice=output.choice,
            finish_reason="error",
            error=_OTHER_END,
        )

    def count(self, news: Output) -> None:
        """Note that ``news`` are handed on."""
        self.received[news.choice] += 1
        if news.finish_reason is not None:
            self.missing.remove(news.choice)


class HeldRequests:
    """All of them, by their ids."""

    def __init__(self) -> None:
        self.by_id: dict[str, Held] = {}

    def hold(
        self, requests: Sequence[Request], mailbox: Mailbox, place: int, told_off: Iterable[int]
    ) -> list[Held]:
        """Expect the outputs of ``requests`` from the engine at ``place``."""
        held = [
            Held(
                request=request,
                mailbox=mailbox,
                place=place,
                missing=set(range(request.params.n)),
                came={place: Counter()},
                told_off=set(told_off),
            )
            for request in requests
        ]
        self.by_id.update({each.request.id: each for each in held})
        return held

    def is_wanted(self, held: Held) -> bool:
        """Whether somebody still waits for it; one of the same id may have followed."""
        return self.by_id.get(held.request.id) is held

    def drop(self, request_ids: Iterable[str]) -> IdsByPlace:
        """Wait for these no more; those that engines may still be at."""
        by_place: IdsByPlace = {}
        for request_id in request_ids:
            held = self.by_id.pop(request_id, None)
            for place in () if held is None else held.came:
                by_place.setdefault(place, []).append(request_id)
        return by_place

    def hand_on(self, place: int, outputs: Sequence[Output]) -> IdsByPlace:
        """Give the outputs of a step at ``place`` to those who wait for them.

        What has ended by it is dropped, and what failed there goes on elsewhere if another engine
        has it as well; the result is that which engines may still be at, and nobody needs.
        """
        by_mailbox: dict[Mailbox, list[Output]] = {}
        left: IdsByPlace = {}
        for output in outputs:
            held = self.by_id.get(output.request_id)
            if held is None or place not in held.came:
                continue  # aborted meanwhile, or it has failed there
            news = held.news(place, output)
            if news is None:
                continue
            if news.finish_reason == "error" and len(held.came) > 1:
                logger.warning(
                    "engine %d failed at what another one has too: %s", place, news.error
                )
                del held.came[place]
                held.told_off.add(place)
                held.failure = news.error
                left.setdefault(place, []).append(output.request_id)
                continue
            by_mailbox.setdefault(held.mailbox, []).append(news)
            held.count(news)
            if not held.missing:
                del self.by_id[output.request_id]
                for other in held.came.keys() - {place}:
                    left.setdefault(other, []).append(output.request_id)
        for mailbox, some in by_mailbox.items():
            mailbox.put(some)
        return left

    def num_choices(self, place: int) -> int:
        """Choices that the engine at ``place`` may be at."""
        return sum(len(held.missing) for held in self.by_id.values() if place in held.came)
