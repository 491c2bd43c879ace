"""The requests that clients of one frontend wait for, and what has come for each of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from shoal.inference.protocol import Output
from shoal.inference.request import Request
from shoal_deployments.mailbox import Mailbox

IdsByPlace = dict[int, list[str]]
"""Ids of requests, by the place of an engine that has them."""


@dataclass(eq=False, kw_only=True, slots=True)
class Held:
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
                num_missing=request.params.n,
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

        What has ended by it is dropped; the result is that which other engines may still be at.
        """
        by_mailbox: dict[Mailbox, list[Output]] = {}
        left: IdsByPlace = {}
        for output in outputs:
            held = self.by_id.get(output.request_id)
            if held is None or place not in held.came:
                continue  # aborted meanwhile
            if not held.is_new(place, output):
                continue
            by_mailbox.setdefault(held.mailbox, []).append(output)
            held.num_missing -= output.finish_reason is not None
            if held.num_missing == 0:
                del self.by_id[output.request_id]
                for other in held.came.keys() - {place}:
                    left.setdefault(other, []).append(output.request_id)
        for mailbox, some in by_mailbox.items():
            mailbox.put(some)
        return left

    def num_choices(self, place: int) -> int:
        """Choices that the engine at ``place`` may be at."""
        return sum(held.num_missing for held in self.by_id.values() if place in held.came)
