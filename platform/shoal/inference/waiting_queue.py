"""The sequences that wait for blocks, in the order in which they get them."""

from __future__ import annotations

from bisect import bisect_left, insort

from shoal.inference.sequence import Sequence


def place_of(arrival: int, priority: int, index: int, per_level: int) -> tuple[int, int, int]:
    """Place in the order of choice ``index`` of the request that came as number ``arrival``.

    A request of priority p goes where one of priority 0 that came p * ``per_level`` arrivals later
    would go. So among equals the first come are first served, and a request is overtaken by at
    most ``per_level`` later ones for each level that they are above it: none waits for ever.
    """
    return arrival + priority * per_level, arrival, index


class WaitingQueue:
    """Sequences sorted by ``place``; only the head is ever admitted."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def head(self) -> Sequence | None:
        """Who is next."""
        return self._sequences[0] if self._sequences else None

    def add(self, sequence: Sequence) -> None:
        """Queue ``sequence`` at its place."""
        insort(self._sequences, sequence, key=lambda other: other.place)

    def remove(self, sequence: Sequence) -> None:
        """Take ``sequence`` out, wherever it stands."""
        at = bisect_left(self._sequences, sequence.place, key=lambda other: other.place)
        assert self._sequences[at] is sequence
        del self._sequences[at]
