"""Counters that every rank of one host sees, and how a rank waits for its peers' counters.

Each rank writes its own row and reads all rows. A counter only grows and says how many steps of one
kind its rank has completed, always in the same order; so ``lowest(kind) > n`` means that every rank
has completed step ``n``. What a rank wrote to shared memory before it raised a counter is seen by
whoever sees the raised counter: this needs the ordered stores of x86 processors.
"""

from __future__ import annotations

import os
import select
import time
import weakref
from collections.abc import Callable
from enum import IntEnum

from shoal.errors import PeerLost, WorkError

_ROW_WORDS = 128
_FINGERPRINT_WORD = 16

IN_FLIGHT = 64
"""Deeds that may be under way at once; each leaves its fingerprint on the board."""

_YIELDS = 200
_PAUSE_S = 20e-6
_LONGEST_PAUSE_S = 1e-3
_CHECK_EVERY_S = 0.05


class Counter(IntEnum):
    """What a rank tells its peers."""

    PUBLISHED = 0
    """Deeds whose input lies in shared memory."""

    COMBINED = 1
    """Deeds whose inputs this rank has read."""

    FINISHED = 2
    """Deeds of which this rank reads nothing more in shared memory."""

    RELEASED = 3
    """Times that this rank stopped reading a gather buffer."""

    LIVE = 4
    """Gather buffers that exist; the one word that also falls."""

    LEFT = 5
    """One when the rank takes part no more."""


class Board:
    """All rows, seen by one rank."""

    def __init__(
        self, words: memoryview, rank: int, process_descriptors: dict[int, int], timeout_s: float
    ) -> None:
        """``words`` start zeroed; the peers' pidfds by rank become the board's to close."""
        self._words = words
        self._row = rank * _ROW_WORDS
        self._processes = process_descriptors
        self._timeout_s = timeout_s
        size = len(process_descriptors) + 1
        self._rows = [rank * _ROW_WORDS for rank in range(size)]
        for descriptor in process_descriptors.values():
            weakref.finalize(self, os.close, descriptor).atexit = False

    @staticmethod
    def nbytes(size: int) -> int:
        """Bytes of the board of ``size`` ranks."""
        return size * _ROW_WORDS * 8

    def set(self, counter: Counter, value: int) -> None:
        """Write this rank's counter."""
        self._words[self._row + counter] = value

    def own(self, counter: Counter) -> int:
        """This rank's counter."""
        value: int = self._words[self._row + counter]
        return value

    def lowest(self, counter: Counter) -> int:
        """The counter of the rank that is furthest behind."""
        words = self._words
        return min([words[row + counter] for row in self._rows])

    def highest(self, counter: Counter) -> int:
        """The counter of the rank that is furthest ahead."""
        words = self._words
        return max([words[row + counter] for row in self._rows])

    def sign(self, sequence: int, fingerprint: int) -> None:
        """Say what this rank's deed number ``sequence`` is."""
        self._words[self._row + _FINGERPRINT_WORD + sequence % IN_FLIGHT] = fingerprint

    def check_signatures(self, sequence: int) -> None:
        """Raise unless deed number ``sequence``, published by every rank, is the same on all."""
        word = _FINGERPRINT_WORD + sequence % IN_FLIGHT
        if len({self._words[row + word] for row in self._rows}) > 1:
            self.leave()
            raise WorkError(
                f"The ranks of an axis disagree about what their collective number {sequence} is."
            )

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Return once ``condition`` holds; raise ``PeerLost`` if a peer is lost or too slow."""
        deadline = time.monotonic() + self._timeout_s
        check_at = time.monotonic() + _CHECK_EVERY_S
        pause_s = _PAUSE_S
        attempts = 0
        while not condition():
            attempts += 1
            if attempts < _YIELDS:
                os.sched_yield()
                continue
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.2, _LONGEST_PAUSE_S)
            now = time.monotonic()
            if now < check_at:
                continue
            check_at = now + _CHECK_EVERY_S
            problem = self._problem()
            if problem is None and now > deadline:
                problem = f"a rank of this axis did not answer within {self._timeout_s:g} s"
            if problem is not None and not condition():  # it may have answered before it left
                self.leave()
                raise PeerLost(f"A collective in shared memory failed: {problem}.")

    def _problem(self) -> str | None:
        for rank, row in enumerate(self._rows):
            if self._words[row + Counter.LEFT]:
                return f"rank {rank} of this axis gave up or ended"
        poll = select.poll()
        ranks = {descriptor: rank for rank, descriptor in self._processes.items()}
        for descriptor in ranks:
            poll.register(descriptor, select.POLLIN)
        ended = [ranks[descriptor] for descriptor, _ in poll.poll(0)]
        return f"the process of rank {ended[0]} of this axis ended" if ended else None

    def leave(self) -> None:
        """Tell the peers that this rank takes part no more."""
        self._words[self._row + Counter.LEFT] = 1
