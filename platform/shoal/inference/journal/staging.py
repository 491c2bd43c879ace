"""What waits for the disk: filled by the engine's thread, emptied by the journal's.

All that comes while the disk is at one batch becomes the next one. In it the tokens of a choice are
one record, however many steps they came from, so that a slow disk gets few and large ones.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from shoal.inference.journal.records import Began, Grew, Record

_RECORD_TOKENS = 4096
"""Most tokens of one record: encoding them holds the interpreter for less than a millisecond."""


@dataclass(eq=False, slots=True)
class _Growth:
    """What was generated for one choice since the batch began."""

    position: int
    tokens: array[int] = field(default_factory=lambda: array("I"))
    finish_reason: str | None = None


@dataclass(eq=False, slots=True)
class Batch:
    """What goes to the disk in one piece."""

    number: int
    since: float
    """When the first of it came, by the clock of the staging."""
    num_tokens: int = 0
    began: list[Began] = field(default_factory=list)
    growth: dict[tuple[str, int], _Growth] = field(default_factory=dict)

    def records(self) -> Iterator[Record]:
        """Each request before what was generated for it."""
        yield from self.began
        for (request_id, choice), growth in self.growth.items():
            # A choice may end without a token.
            for start in range(0, max(1, len(growth.tokens)), _RECORD_TOKENS):
                stop = start + _RECORD_TOKENS
                is_last = stop >= len(growth.tokens)
                yield Grew(
                    request_id=request_id,
                    choice=choice,
                    position=growth.position + start,
                    token_ids=tuple(growth.tokens[start:stop]),
                    finish_reason=growth.finish_reason if is_last else None,
                )


class Staging:
    """Batches in the making, of at most ``capacity`` tokens with what the disk is at.

    Tokens of prompts count as well. With ``is_hard`` nothing is taken beyond the capacity; without,
    it is for the caller to take no new requests while ``is_full``, and what the old ones still
    generate is taken.
    """

    def __init__(
        self, capacity: int, *, is_hard: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._capacity = capacity
        self._is_hard = is_hard
        self._clock = clock
        self._condition = threading.Condition()
        self._batch: Batch | None = None
        self._in_flight: Batch | None = None
        self._next_number = 1
        self._flushed = 0
        """Batches up to this number wait for no clock."""
        self._is_closed = False

    @property
    def num_tokens(self) -> int:
        """Tokens that are not on the disk yet."""
        with self._condition:
            return self._num_tokens()

    @property
    def is_full(self) -> bool:
        """Whether the capacity is reached, or nothing is taken any more."""
        with self._condition:
            return self._is_closed or self._num_tokens() >= self._capacity

    @property
    def oldest_s(self) -> float:
        """For how long the oldest of what is not on the disk has waited; 0 where nothing does."""
        with self._condition:
            oldest = self._in_flight or self._batch
            return 0.0 if oldest is None else self._clock() - oldest.since

    def begin(self, began: Began) -> int | None:
        """Add a request; gives the number of its batch, or None where there is no room."""
        with self._condition:
            batch = self._room_for(len(began.request.prompt))
            if batch is None:
                return None
            batch.began.append(began)
            return batch.number

    def grow(self, grew: Grew) -> int | None:
        """Add what came for a choice; gives the batch's number, or None where there is no room."""
        with self._condition:
            batch = self._room_for(len(grew.token_ids))
            if batch is None:
                return None
            key = (grew.request_id, grew.choice)
            growth = batch.growth.get(key)
            if growth is None:
                growth = batch.growth[key] = _Growth(grew.position)
            growth.tokens.extend(grew.token_ids)
            growth.finish_reason = grew.finish_reason
            return batch.number

    def take(self, not_before: float) -> Batch | None:
        """The batch in the making, once there is one and the clock shows ``not_before``.

        None once the staging is closed and empty. What was taken before has to be ``done``.
        """
        with self._condition:
            assert self._in_flight is None
            while not self._is_closed:
                wait_s = None if self._batch is None else not_before - self._clock()
                if wait_s is not None and (wait_s <= 0 or self._waits(self._flushed)):
                    break
                self._condition.wait(wait_s)
            self._in_flight, self._batch = self._batch, None
            return self._in_flight

    def done(self) -> None:
        """Count what was taken as waiting no more."""
        with self._condition:
            self._in_flight = None
            self._condition.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Have all that is here taken whatever the clock shows; whether it is done in time."""
        with self._condition:
            last = self._flushed = self._next_number - 1
            self._condition.notify_all()
            return self._condition.wait_for(lambda: not self._waits(last), timeout_s)

    def close(self) -> None:
        """Take nothing more; what is there can still be taken."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()

    def wait_closed(self, timeout_s: float) -> bool:
        """Wait for ``close``; whether it came in time."""
        with self._condition:
            return self._condition.wait_for(lambda: self._is_closed, timeout_s)

    def _room_for(self, num_tokens: int) -> Batch | None:
        """The batch in the making, ``num_tokens`` counted; None where they have no room."""
        if self._is_closed:
            return None
        if self._is_hard and self._num_tokens() + num_tokens > self._capacity:
            return None
        if self._batch is None:
            self._batch = Batch(self._next_number, self._clock())
            self._next_number += 1
            self._condition.notify_all()
        self._batch.num_tokens += num_tokens
        return self._batch

    def _waits(self, number: int) -> bool:
        """Whether a batch of up to this number is not done."""
        return any(batch.number <= number for batch in (self._batch, self._in_flight) if batch)

    def _num_tokens(self) -> int:
        return sum(batch.num_tokens for batch in (self._batch, self._in_flight) if batch)
