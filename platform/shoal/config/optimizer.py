"""How weights are updated."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from shoal.config.section import Section, in_vain, refuse
from shoal.errors import ConfigError


class ScheduleSettings(Section):
    """``optimizer.schedule``: the learning rate over steps, as a share of ``optimizer.lr``."""

    kind: Literal["constant", "cosine", "linear", "wsd"] = "constant"
    """Shape after the warm-up; ``wsd`` is warm-up, stable, decay."""

    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the rate rises linearly from 0."""

    decay_steps: int | None = Field(default=None, ge=1)
    """Steps over which the rate falls; unset: all after the warm-up (``cosine``, ``linear``), a
    tenth of the run (``wsd``)."""

    final: float = Field(default=0.0, ge=0.0, le=1.0)
    """Share of ``lr`` that remains at the end."""

    @model_validator(mode="after")
    def _decays_where_it_says_so(self) -> ScheduleSettings:
        if self.kind == "constant":
            problem = "a constant rate does not decay"
            remedy = "Leave it out, or set optimizer.schedule.kind to cosine, linear or wsd"
            refuse(in_vain(self, ("decay_steps", "final"), problem, remedy))
        return self


_MUON_MOMENTUM = 0.95


class OptimizerSettings(Section):
    """``optimizer``: kind, rates, decay and clipping."""

    kind: Literal["adamw", "sgd", "muon"] = "adamw"
    """Update rule; ``muon`` takes the matrices inside the layers and leaves the rest to AdamW."""

    lr: float = Field(default=3e-4, gt=0)
    """Peak learning rate."""

    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of AdamW's first and second moments, also for what ``muon`` leaves to AdamW; each in
    [0, 1)."""

    eps: float = Field(default=1e-8, gt=0)
    """Added to AdamW's denominator."""

    momentum: float | None = Field(default=None, ge=0, lt=1)
    """Decay of the running sum of gradients; unset: 0 for SGD, 0.95 for Muon."""

    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled decay of matrices; vectors (norms, biases) are not decayed."""

    clip: float | None = Field(default=None, gt=0)
    """Upper bound of the gradient's norm over all parameters; unset does not clip."""

    expert_bias_rate: float | None = Field(default=None, gt=0)
    """For models that choose experts with a bias (``dots1``): the amount by which an expert's bias
    rises in a step that gave it fewer tokens than the mean, and falls in one that gave it more.
    Unset leaves biases as they are."""

    schedule: ScheduleSettings = ScheduleSettings()
    """The learning rate over steps."""

    @model_validator(mode="after")
    def _rates_fit_the_kind(self) -> OptimizerSettings:
        found = []
        if not all(0 <= beta < 1 for beta in self.betas):
            problem = "each decay must lie in [0, 1)"
            remedy = "Use values such as [0.9, 0.95]"
            found.append(ConfigError("betas", list(self.betas), problem, remedy))
        if self.kind == "sgd":
            remedy = "Leave it out, or set optimizer.kind to adamw"
            found += in_vain(self, ("betas", "eps"), "sgd has no such term", remedy)
        if self.momentum is not None and self.kind == "adamw":
            problem = "adamw takes no momentum"
            remedy = "Leave it out, or set optimizer.kind to sgd or muon"
            found.append(ConfigError("momentum", self.momentum, problem, remedy))
        refuse(found)
        return self

    @property
    def momentum_or_default(self) -> float:
        """The momentum, for kinds that have one."""
        if self.momentum is not None:
            return self.momentum
        return _MUON_MOMENTUM if self.kind == "muon" else 0.0
