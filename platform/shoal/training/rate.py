"""The learning rate as a pure function of the step: nothing to save, nothing to restore."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shoal.config import OptimizerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRate:
    """The rate of every step of a run.

        rate            constant        cosine, linear        wsd
         lr             ____________    __                    ________
                       /               /  \\                  /        \\
         final * lr   /               /    \\____            /          \\
         0          warm-up         warm-up   decay        warm-up     decay

    Steps count from 0, the first update. Of ``warmup_steps`` = W the step s < W takes
    (s + 1) / (W + 1) of the peak, so that no update is made at rate 0 and step W has the peak.
    """

    settings: OptimizerSettings
    """Peak rate, shape and lengths."""

    num_steps: int
    """Updates of the whole run."""

    @property
    def _decay_steps(self) -> int:
        schedule = self.settings.schedule
        if schedule.decay_steps is not None:
            return schedule.decay_steps
        after_warmup = self.num_steps - schedule.warmup_steps
        if schedule.kind == "wsd":
            return min(max(1, self.num_steps // 10), after_warmup)
        return after_warmup

    def at(self, step: int) -> float:
        """The learning rate of update ``step``, counted from 0."""
        warmup_steps = self.settings.schedule.warmup_steps
        if step < warmup_steps:
            return self.settings.lr * (step + 1) / (warmup_steps + 1)
        return self.settings.lr * self._share(step)

    def _share(self, step: int) -> float:
        """Share of the peak after the warm-up."""
        schedule = self.settings.schedule
        if schedule.kind == "constant":
            return 1.0
        start = schedule.warmup_steps
        if schedule.kind == "wsd":
            start = self.num_steps - self._decay_steps
        progress = min(max((step - start) / self._decay_steps, 0.0), 1.0)
        if schedule.kind == "cosine":
            progress = (1.0 - math.cos(math.pi * progress)) / 2
        return 1.0 - (1.0 - schedule.final) * progress
