"""How a sequence is shared among the ranks of a context group.

It is cut into twice as many chunks as there are ranks, and rank r of n gets chunk r and chunk
2n-1-r. A token attends to all that precede it, so early chunks are light and late ones heavy; each
rank has one of either, and all have equal work:

    chunk    0   1   2   3   4   5   6   7        4 ranks
    rank     0   1   2   3   3   2   1   0

Where the length does not divide, the first chunks have one token more. Nothing is filled up: no
token exists that a loss would have to leave out, and ranks differ by one token at most.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shoal.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Consecutive positions of a sequence, and where in a tensor they lie."""

    start: int
    stop: int
    """One past the last position."""
    offset: int
    """Index in the tensor of ``start``."""

    def part(self, start: int, stop: int) -> slice:
        """Where positions ``start`` to ``stop`` of the run lie."""
        return slice(self.offset + start - self.start, self.offset + stop - self.start)


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceCut:
    """A sequence of ``length`` tokens among ``size`` ranks.

    Raises ``ConfigError`` where a chunk would be empty.
    """

    length: int
    size: int

    def __post_init__(self) -> None:
        if self.length < 2 * self.size:
            raise ConfigError(
                "data.seq_len",
                self.length,
                f"it is cut into {2 * self.size} chunks, two for each of {self.size} context "
                "ranks, and some would be empty",
                f"Use at least {2 * self.size}, or a lower parallel.context",
            )

    @property
    def longest(self) -> int:
        """Most tokens that a rank has."""
        return -(-self.length // self.size)

    def runs(self, rank: int) -> tuple[Run, Run]:
        """The two chunks of ``rank``, one behind the other in its tensors."""
        start, stop = self._chunk(rank)
        late_start, late_stop = self._chunk(2 * self.size - 1 - rank)
        return (
            Run(start=start, stop=stop, offset=0),
            Run(start=late_start, stop=late_stop, offset=stop - start),
        )

    def take(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """The part of ``rank`` of ``tensor`` ``[B, S, ...]``."""
        return torch.cat([tensor[:, run.start : run.stop] for run in self.runs(rank)], dim=1)

    def _chunk(self, index: int) -> tuple[int, int]:
        size, longer = divmod(self.length, 2 * self.size)
        start = index * size + min(index, longer)
        return start, start + size + (index < longer)
