"""How soon a run will be over."""

from __future__ import annotations

from collections import deque

from shoal.training.metrics import StepMetrics

RECENT_STEPS = 20
"""Steps by whose time the rest of the run is estimated."""


class Pace:
    """Tells by the steps made how long those that are left will take."""

    def __init__(self, num_steps: int) -> None:
        """``num_steps`` are those of the whole run."""
        self._num_steps = num_steps
        self._step = 0
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)

    def count(self, metrics: StepMetrics) -> None:
        """One more step was made."""
        self._step = metrics.step
        self._recent.append(metrics.step_seconds)

    @property
    def left_s(self) -> float | None:
        """Seconds until the last step at the present rate; None before the first one counted."""
        if not self._recent:
            return None
        return (self._num_steps - self._step) * sum(self._recent) / len(self._recent)
