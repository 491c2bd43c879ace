"""The ranks that save or load together, and how one's failure becomes everyone's.

Every deed ends in one exchange of outcomes:

    rank 0   work ──┐            ┌── all worked: go on with everyone's results
    rank 1   work ──┼─ outcomes ─┤
    rank 2   fails ─┘            └── one failed: each rank raises that rank's failure

so that no rank goes on alone, and none waits for one that has given up. A rank that is killed or
hangs ends the exchange too: at once, or after the group's timeout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from shoal.errors import ShoalError, WorkError

S = TypeVar("S")
T = TypeVar("T")


class Peers:
    """The ranks of one process group; a process outside any group is alone."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """``group`` unset takes the default group where one is initialised."""
        self._group = group
        self._alone = group is None and not (dist.is_available() and dist.is_initialized())

    @property
    def rank(self) -> int:
        """This rank's place in the group."""
        return 0 if self._alone else dist.get_rank(self._group)

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return 1 if self._alone else dist.get_world_size(self._group)

    @property
    def first(self) -> bool:
        """Whether this is the rank that acts for all."""
        return self.rank == 0

    def each(self, deed: str, work: Callable[[], T]) -> T:
        """Run ``work`` on every rank and return what it returned here, once all are through.

        Where ``work`` raised on any rank, every rank raises the first such rank's failure: a
        ShoalError as it is, anything else as a WorkError that says what ``deed`` it ended.
        """
        return self.tell(deed, lambda: (work(), None))[0]

    def tell(self, deed: str, work: Callable[[], tuple[T, S]]) -> tuple[T, list[S]]:
        """Like ``each``; the second thing that ``work`` returns is small, and told to all ranks."""
        result: Any = None
        word: Any = None
        cause: Exception | None = None
        try:
            result, word = work()
        except Exception as error:  # the edge to the peers: whatever happened is passed on to all
            cause = error
        failure = None if cause is None else self._told(deed, cause)
        told = self.share(deed, (failure, word))
        failures = [each for each, _ in told if each is not None]
        if failures and failures[0] is cause:
            raise failures[0]
        if failures:
            raise failures[0] from cause
        return result, [words for _, words in told]

    def share(self, deed: str, value: T) -> list[T]:
        """Every rank's value in rank order, on every rank: keep the values small."""
        values: list[Any] = [None] * self.size
        self._exchange(deed, lambda: self._all_gather(values, value))
        return values

    def gather(self, deed: str, value: T) -> list[T]:
        """Every rank's value in rank order on the first rank, nothing elsewhere."""
        values: list[Any] = [None] * self.size if self.first else []
        self._exchange(deed, lambda: self._gather(values, value))
        return values

    def _told(self, deed: str, error: Exception) -> ShoalError:
        if isinstance(error, ShoalError):
            return error
        place = "" if self._alone else f" on rank {self.rank}"
        return WorkError(f"{deed} failed{place}: {type(error).__name__}: {error}")

    def _exchange(self, deed: str, collective: Callable[[], None]) -> None:
        try:
            collective()
        except RuntimeError as error:  # what torch.distributed raises for a lost or silent peer
            raise WorkError(f"{deed} failed: a peer was lost: {error}") from error

    def _all_gather(self, values: list[Any], value: object) -> None:
        if self._alone:
            values[0] = value
        else:
            dist.all_gather_object(values, value, group=self._group)

    def _gather(self, values: list[Any], value: object) -> None:
        if self._alone:
            values[0] = value
        else:
            dist.gather_object(value, values or None, group=self._group, group_dst=0)
