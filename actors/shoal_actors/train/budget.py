"""How often a run is started again after failures, and how soon.

What counts is failures without progress between them: a run of weeks may fail as often as its
machines do, while one that fails over and over in one place ends. A newer complete checkpoint is
progress; steps that no checkpoint holds are made again after the next failure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FIRST_DELAY_S = 2.0
"""Seconds before the second restart in a row; the first comes at once."""

LONGEST_DELAY_S = 300.0
"""Each further delay is twice the one before, up to this many seconds."""


class Budget:
    """Counts the failures of one run."""

    def __init__(self, max_failures: int) -> None:
        """At most ``max_failures`` in a row are recovered from."""
        self._max_failures = max_failures
        self.streak: list[Mapping[str, Any]] = []
        """Records of the failures since the newest checkpoint, oldest first."""
        self.delay_s = 0.0
        """Seconds to wait before the restart after the last of them."""

    @property
    def is_spent(self) -> bool:
        """Whether the last failure was one too many."""
        return len(self.streak) > self._max_failures

    def count(self, failure: Mapping[str, Any], *, is_after_progress: bool) -> None:
        """Count a failure; whether a checkpoint was completed since the one before."""
        if is_after_progress:
            self.streak.clear()
        self.streak.append(failure)
        if len(self.streak) == 1:
            self.delay_s = 0.0
        else:
            self.delay_s = min(max(2 * self.delay_s, FIRST_DELAY_S), LONGEST_DELAY_S)
