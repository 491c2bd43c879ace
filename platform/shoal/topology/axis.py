"""The axes along which the ranks of a job are counted."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Axis(StrEnum):
    """One way to divide the ranks; dense and expert layers are divided apart."""

    PIPELINE = "pipeline"
    """Stages of the model, dense and expert view alike."""
    OUTER = "outer"
    """Domains: ranks with equal dense layers and the same place in their domains."""
    INNER = "inner"
    """Ranks with equal dense layers inside one domain."""
    DATA = "data"
    """Ranks with different sequences (dense view)."""
    CONTEXT = "context"
    """Ranks that share one sequence (dense view)."""
    EXPERT_OUTER = "expert_outer"
    """Domains: ranks with equal experts and the same place in their domains."""
    EXPERT_INNER = "expert_inner"
    """Ranks with equal experts inside one domain."""
    EXPERT = "expert"
    """Ranks that share one set of experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """Where one rank stands on each axis, counted from 0."""

    domain: int
    """Domain of fast links, counted over the whole job."""
    pipeline: int
    outer: int
    inner: int
    data: int
    context: int
    expert_outer: int
    expert_inner: int
    expert: int

    def along(self, axis: Axis) -> int:
        """The place on ``axis``."""
        place: int = getattr(self, axis.value)
        return place
