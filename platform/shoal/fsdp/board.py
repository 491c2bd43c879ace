"""Counters that every rank of one host sees, and how a rank waits for its peers' counters.

Each rank writes its own row and reads all rows. A counter only grows and says how many steps of one
kind its rank has completed, always in the same order; so ``lowest(kind) > n`` means that every rank
has completed step ``n``. What a rank wrote to shared memory before it raised a counter is seen by
whoever sees the raised counter: this needs the ordered stores of x86 processors.
"""

from __future__ import annotations

import os
import select
import threading
import time
import weakref
from collections.abc import Callable
from enum import IntEnum

from shoal.errors import PeerLost, WorkError
from shoal.fsdp.memory_file import MemoryFile, sleep_while, unmap, wake, words_at

_ROW_WORDS = 128
_FINGERPRINT_WORD = 16

IN_FLIGHT = 64
"""Deeds that may be under way at once; each leaves its fingerprint on the board."""

_SPIN_S = 50e-6
"""How long a wait asks again and again before it sleeps; waking takes about as long."""

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

    SLEEPING = 6
    """One when the rank wants to be woken after changes."""

    BELL = 7
    """Changes to wake the rank; its peers write it."""


class Board:
    """All rows, seen by one rank."""

    def __init__(
        self, file: MemoryFile, rank: int, process_descriptors: dict[int, int], timeout_s: float
    ) -> None:
        """The board is the start of ``file``; the peers' pidfds by rank become its to close."""
        size = len(process_descriptors) + 1
        self._address = file.map(0, self.nbytes(size))
        self._words = words_at(self._address, size * _ROW_WORDS)
        self._row = rank * _ROW_WORDS
        self._rows = [rank * _ROW_WORDS for rank in range(size)]
        self._peers = [row for row in self._rows if row != self._row]
        self._processes = process_descriptors
        self._timeout_s = timeout_s
        self._fence = threading.Lock()
        weakref.finalize(self, unmap, self._address, self.nbytes(size)).atexit = False
        for descriptor in process_descriptors.values():
            weakref.finalize(self, os.close, descriptor).atexit = False

    @staticmethod
    def nbytes(size: int) -> int:
        """Bytes of the board of ``size`` ranks."""
        return size * _ROW_WORDS * 8

    def set(self, counter: Counter, value: int) -> None:
        """Write this rank's counter and wake who sleeps."""
        words = self._words
        words[self._row + counter] = value
        self._order()
        for row in self._peers:
            if words[row + Counter.SLEEPING]:
                words[row + Counter.BELL] += 1  # any other value will do, so peers may race here
                wake(self._address + 8 * (row + Counter.BELL))

    def own(self, counter: Counter) -> int:
        """This rank's counter."""
        return self._words[self._row + counter]

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

    def wait_for(self, ask: Callable[[], float | None]) -> None:
        """Return once ``ask`` gives ``None``; raise ``PeerLost`` if a peer is lost or too slow.

        What it gives otherwise is the longest time to sleep, in seconds, before it is asked again;
        a peer's counter wakes earlier.
        """
        spin_until = time.monotonic() + _SPIN_S
        while time.monotonic() < spin_until:
            if ask() is None:
                return
        words, bell = self._words, self._row + Counter.BELL
        deadline = spin_until + self._timeout_s
        check_at = spin_until + _CHECK_EVERY_S
        words[self._row + Counter.SLEEPING] = 1
        try:
            while True:
                self._order()
                heard = words[bell]
                longest_s = ask()
                if longest_s is None:
                    return
                sleep_while(self._address + 8 * bell, heard, min(longest_s, _CHECK_EVERY_S))
                if time.monotonic() > check_at:
                    check_at = time.monotonic() + _CHECK_EVERY_S
                    self._check_peers(deadline, ask)
        finally:
            words[self._row + Counter.SLEEPING] = 0

    def _order(self) -> None:
        """Let no later read pass an earlier write; taking a lock does that."""
        with self._fence:
            pass

    def _check_peers(self, deadline: float, ask: Callable[[], float | None]) -> None:
        problem = self._problem()
        if problem is None and time.monotonic() > deadline:
            problem = f"a rank of this axis did not answer within {self._timeout_s:g} s"
        if problem is not None and ask() is not None:  # it may have answered before it left
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
        self.set(Counter.LEFT, 1)
