"""The queue of one rank that takes each step of a collective in shared memory when it can.

A deed goes through three kinds of steps, each taken in the order of the deeds, so one counter for
each kind and rank tells the peers everything:

    publish ──(all published)──► combine ──(all combined, where the deed needs that)──► finish

Nobody works in the background: every call into the communicator takes the steps that have become
possible, without blocking; ``wait`` takes steps until its deed is done.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable

from shoal.fsdp.board import IN_FLIGHT, Board, Counter
from shoal.fsdp.progress import advance_all, register

_LONG_SLEEP_S = 1.0
"""Peers on this axis wake a sleeper when anything changes."""

_SHORT_SLEEP_S = 0.5e-3
"""Peers on other axes do not."""

_Step = tuple[Callable[[], bool], Callable[[], None]]


class DeedQueue:
    """The deeds of one axis that are under way on this rank."""

    def __init__(self, board: Board, rank: int, size: int) -> None:
        self.board = board
        self.rank = rank
        self.size = size
        self._num_deeds = 0
        self._steps: dict[Counter, deque[_Step]] = {
            Counter.PUBLISHED: deque(),
            Counter.COMBINED: deque(),
            Counter.FINISHED: deque(),
        }
        register(self)

    @property
    def next_sequence(self) -> int:
        """The number that the next deed will have."""
        return self._num_deeds

    def submit(self, deed: Deed) -> None:
        """Start a deed made with ``next_sequence``."""
        self._num_deeds += 1
        self.wait_for(lambda: self.board.lowest(Counter.FINISHED) > deed.sequence - IN_FLIGHT)
        self.board.sign(deed.sequence, zlib.crc32(deed.signature.encode()))
        self._steps[Counter.PUBLISHED].append((deed.can_publish, deed.publish))
        self._steps[Counter.COMBINED].append((deed.can_combine, deed.combine))
        self._steps[Counter.FINISHED].append((deed.can_finish, deed.finish))
        self.advance()

    def advance(self) -> bool:
        """Take every step that is possible now; whether some are left."""
        moved = True
        while moved:
            moved = False
            for counter, steps in self._steps.items():
                while steps and steps[0][0]():
                    _, take = steps.popleft()
                    take()
                    self.board.set(counter, self.board.own(counter) + 1)
                    moved = True
        return bool(self._steps[Counter.FINISHED])

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Take steps until the condition holds; raises ``PeerLost`` if a peer is lost."""
        if condition():
            return

        def ask() -> float | None:
            self.advance()
            steps_left = advance_all(but=self)
            if condition():
                return None
            return _SHORT_SLEEP_S if steps_left else _LONG_SLEEP_S

        self.board.wait_for(ask)


class Deed:
    """One collective, as one rank sees it."""

    def __init__(self, queue: DeedQueue, signature: str) -> None:
        """``signature`` is what every rank must agree the deed is."""
        self._queue = queue
        self._board = queue.board
        self.sequence = queue.next_sequence
        self.signature = signature

    def wait(self) -> None:
        """See ``Pending``."""
        self._queue.wait_for(self.done)

    def done(self) -> bool:
        """Whether the result is in place and this rank's input no longer needed."""
        return self._board.own(Counter.COMBINED) > self.sequence

    def can_publish(self) -> bool:
        """Whether the memory to be published in is free."""
        return True

    def publish(self) -> None:
        """Bring this rank's input into shared memory."""

    def can_combine(self) -> bool:
        """Whether every rank's input lies in shared memory."""
        return self._board.lowest(Counter.PUBLISHED) > self.sequence

    def combine(self) -> None:
        """Read the inputs."""
        self._board.check_signatures(self.sequence)

    def can_finish(self) -> bool:
        """Whether ``finish`` may run."""
        return self._board.own(Counter.COMBINED) > self.sequence

    def finish(self) -> None:
        """Read what the ranks combined."""
