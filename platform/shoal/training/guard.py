"""Refuses steps that would spoil the weights: no finite loss, no finite gradient, a sudden spike.

What it decides depends on the losses alone, which all ranks share bit for bit, and what it
remembers is saved with the weights: all ranks decide alike, and a resumed run as an uncut one.
"""

from __future__ import annotations

import math
from collections import deque

from shoal.config import GuardSettings
from shoal.errors import WorkError


class SpoiledStep(WorkError):
    """A step was refused before any weight changed."""

    def __init__(self, step: int, cause: str) -> None:
        """``step`` is the number that it would have had; ``cause`` continues a sentence."""
        self.step = step
        self.cause = cause
        super().__init__(
            f"Step {step}: {cause}. The weights stay those of step {step - 1}. "
            "Lower optimizer.lr, clip the gradient (optimizer.clip), look at the data, or have "
            "train.guard go on without such batches."
        )

    def __reduce__(self) -> tuple[type[SpoiledStep], tuple[int, str]]:
        return type(self), (self.step, self.cause)


class Guard:
    """Judges the steps of a run, one after another."""

    def __init__(self, settings: GuardSettings) -> None:
        self._settings = settings
        self._losses: deque[float] = deque(maxlen=settings.window)

    def check_finite(self, step: int, name: str, value: float) -> None:
        """Raise SpoiledStep where a value of this step is no number or infinite."""
        if not math.isfinite(value):
            raise SpoiledStep(step, f"the {name} is {value}")

    @property
    def most(self) -> float:
        """The largest loss that the next step may have."""
        factor, window = self._settings.spike_factor, self._settings.window
        if factor is None or len(self._losses) < window:
            return math.inf
        return factor * math.fsum(self._losses) / window

    def take(self, step: int, loss: float) -> None:
        """Count the loss of a step; raise SpoiledStep where it is above ``most``."""
        if loss > self.most:
            raise SpoiledStep(
                step,
                f"the loss is {loss:.6g}, more than {self._settings.spike_factor:g} times the mean "
                f"of the {self._settings.window} before it",
            )
        if self._settings.spike_factor is not None:
            self._losses.append(loss)

    @property
    def losses(self) -> list[float]:
        """All that it remembers: losses that a spike is measured against, oldest first."""
        return list(self._losses)

    @losses.setter
    def losses(self, values: list[float]) -> None:
        self._losses.clear()
        self._losses.extend(values)


class Recovery:
    """Counts what is done about spoiled steps, so that a run that cannot be saved ends.

    Starts anew with each attempt, which repeats everything since the checkpoint, refusals included.
    """

    def __init__(self, settings: GuardSettings) -> None:
        self._limit = settings.limit
        self._from: int | None = None
        self._count = 0

    def count(self, spoiled: SpoiledStep, step: int) -> None:
        """Allow the loop to go on from ``step``, or raise ``spoiled`` if it did so too often."""
        self._count = self._count + 1 if step == self._from else 1
        self._from = step
        if self._count > self._limit:
            raise spoiled
