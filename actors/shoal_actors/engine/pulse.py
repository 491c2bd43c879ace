"""What an engine actor says of itself: plain values that cross processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.inference.journal import JournalStats
from shoal.inference.limits import Limits
from shoal.inference.protocol import Stats


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineFacts:
    """What does not change while the engine lives."""

    limits: Limits
    """Which requests it takes."""

    fingerprint: str
    """Hash of its kernels' results: engines with the same one give the same bits."""

    weights: str
    """Mark of the weights that it loaded: their folder may have been changed since others did."""

    certificate: Mapping[str, Any]
    """What was proven of its kernels when it loaded; plain JSON values."""

    @property
    def promise(self) -> str | None:
        """The fingerprint; None where the kernels were not proven, so that it promises nothing."""
        return self.fingerprint if self.certificate["passed"] else None

    def agrees_with(self, other: EngineFacts | None) -> bool:
        """Whether the two promise the same bits for the same request."""
        if other is None or self.promise is None:
            return False
        return self.promise == other.promise and self.weights == other.weights


@dataclass(frozen=True, kw_only=True, slots=True)
class Pulse:
    """An engine at a moment."""

    stats: Stats

    busy_s: float
    """How long the engine has been at the step under way and what came before it; 0 while there is
    no work."""

    moved_from: Mapping[int, int] = field(default_factory=dict)
    """Requests that it took over, by the place of the engine that was lost."""

    journal: JournalStats | None = None
    """Unset where no journal is kept."""
