"""Sizes of a run whose workers got machines that do not do, and when each is tried again.

Nobody says when a machine has its memory back, or when others have left a node. So a size is tried
again after a while, which is twice as long each time.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_DELAY_S = 30.0
"""Seconds after which a size is tried again for the first time."""

LONGEST_DELAY_S = 1800.0
"""Each further delay is twice the one before, up to this many seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setback:
    problem: str
    delay_s: float
    until: float


class Setbacks:
    """Counts the setbacks of one run; ``now`` is in seconds of any clock that goes on."""

    def __init__(self, first_delay_s: float = FIRST_DELAY_S) -> None:
        self._first_delay_s = first_delay_s
        self._last: dict[int, _Setback] = {}

    def count(self, size: int, problem: str, now: float) -> None:
        """Workers of a size were refused what they got, for the ``problem`` given."""
        last = self._last.get(size)
        delay_s = self._first_delay_s if last is None else min(2 * last.delay_s, LONGEST_DELAY_S)
        self._last[size] = _Setback(problem=problem, delay_s=delay_s, until=now + delay_s)

    def against(self, size: int, now: float) -> str | None:
        """What still speaks against a size; None where it may be tried."""
        last = self._last.get(size)
        return None if last is None or now >= last.until else last.problem
