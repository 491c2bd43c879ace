"""Parameters of which the ranks of one mesh hold a part only, as with expert parallelism."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One of ``count`` equal runs of rows that whole parameters are dealt out in."""

    index: int = 0
    """Which of the runs, counted from 0."""

    count: int = 1
    """How many there are; each belongs to other ranks."""

    def whole(self, part: torch.Size) -> torch.Size:
        """Shape of the whole parameter of which a part has the shape ``part``."""
        return torch.Size([part[0] * self.count, *part[1:]])

    def first_row(self, part: torch.Size) -> int:
        """Where the part begins in the whole parameter."""
        return part[0] * self.index
