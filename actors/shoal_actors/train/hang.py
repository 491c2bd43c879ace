"""Which rank holds the others up, by the signs that they give.

A rank whose beats stop is silent: its process was stopped or starved, or its node is gone. A rank
that beats on outside of every collective, while others wait in one, is late. Ranks that wait are
not to blame. On GPUs a rank waits in the device, where its stack does not tell: there only silent
ranks are told from the others.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal_actors.train.failure import FailureReport
from shoal_actors.train.pulse import PERIOD_S, Sign, read_signs

SILENT = "ProcessSilent"
"""``kind`` of a report on a rank that gives no sign any more."""

LATE = "RankLate"
"""``kind`` of a report on a rank that others waited for in vain."""

LOOK_S = 3 * PERIOD_S
"""Seconds in which a living rank gives a sign."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Looks for the rank that others waited for, once they have given up."""

    folder: Path
    """The run's logs, where the signs are."""

    num_ranks: int
    """Ranks of the run."""

    def silent(self, rank: int) -> FailureReport:
        """The report on a rank whose process did not answer."""
        return _report(SILENT, rank, read_signs(self.folder, self.num_ranks).get(rank))

    def late(self, failed: Collection[int]) -> FailureReport | None:
        """The rank, not of those that ``failed``, that explains why they waited in vain.

        Takes ``LOOK_S`` seconds.
        """
        before = read_signs(self.folder, self.num_ranks)
        time.sleep(LOOK_S)
        now = {
            rank: sign
            for rank, sign in read_signs(self.folder, self.num_ranks).items()
            if rank not in failed and rank in before
        }
        silent = [sign for rank, sign in now.items() if sign.beat == before[rank].beat]
        if silent:
            return _report(SILENT, silent[0].rank, silent[0])
        late = furthest_behind(now)
        return None if late is None else _report(LATE, late.rank, late)


def furthest_behind(signs: Mapping[int, Sign]) -> Sign | None:
    """Of the ranks that wait for nobody, the one at the earliest step, longest in its place."""
    busy = [sign for sign in signs.values() if not sign.is_waiting]
    return min(busy, key=lambda sign: (sign.step or 0, -sign.seconds), default=None)


def where(sign: Sign) -> str:
    """In words, where a rank was seen last."""
    made = "before its first step" if sign.step is None else f"after step {sign.step}"
    return f"{made}, in {sign.place}, process {sign.pid} on {sign.host}"


def _report(kind: str, rank: int, sign: Sign | None) -> FailureReport:
    deed = "gives no sign any more" if kind == SILENT else "kept the others waiting"
    seen = "it gave none in this attempt" if sign is None else f"last seen {where(sign)}"
    return FailureReport(
        rank=rank,
        kind=kind,
        message=f"it {deed}; {seen}",
        traceback="" if sign is None else f"Stack of rank {rank} when last seen:\n{sign.stack}",
        is_consequence=False,
        is_final=False,
    )
