"""The order in which sequences get blocks, and those that stand in it: waiting, or running."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from shoal.inference.scheduling.sequence import Sequence


def place_of(arrival: int, priority: int, index: int, per_level: int) -> tuple[int, int, int]:
    """Place in the order of choice ``index`` of the request that came as number ``arrival``.

    A request of priority p goes where one of priority 0 that came p * ``per_level`` arrivals later
    would go. So among equals the first come are first served, and a request is overtaken by at
    most ``per_level`` later ones for each level that they are above it: none waits for ever.
    """
    return arrival + priority * per_level, arrival, index


class InOrder:
    """Sequences sorted by ``place``."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    @property
    def first(self) -> Sequence | None:
        """Who is next."""
        return self._sequences[0] if self._sequences else None

    @property
    def last(self) -> Sequence:
        """Who is the first to give way; there has to be one."""
        return self._sequences[-1]

    def add(self, sequence: Sequence) -> None:
        """Put ``sequence`` at its place."""
        insort(self._sequences, sequence, key=lambda other: other.place)

    def remove(self, sequence: Sequence) -> None:
        """Take ``sequence`` out, wherever it stands."""
        at = bisect_left(self._sequences, sequence.place, key=lambda other: other.place)
        assert self._sequences[at] is sequence
        del self._sequences[at]
