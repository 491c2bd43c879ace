"""Number formats of each stage of a training step."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from shoal.config.section import Section, in_vain, refuse
from shoal.errors import ConfigError


class PrecisionSettings(Section):
    """``precision``: formats of compute, weights, gradients, reduction and moments."""

    compute: Literal["auto", "fp32", "bf16", "mxfp8"] = "auto"
    """Forward and backward; ``auto`` is bf16 where the device has bf16 units and fp32 elsewhere;
    ``mxfp8`` multiplies linear and expert layers in MXFP8 and uses bf16 for the rest."""

    parameter_gather: Literal["bf16", "mxfp8"] | None = None
    """Format in which sharded parameters travel; unset follows ``compute``. With ``mxfp8`` the
    matrices that are multiplied in it also travel in it, which changes no result."""

    main_weights: Literal["fp32", "bf16"] = "fp32"
    """Weights that the optimizer updates."""

    rounding: Literal["nearest", "stochastic"] = "nearest"
    """How updated weights become bf16 main weights; ``stochastic`` keeps, on average,
    updates that are smaller than a step of bf16, with the same bits at every layout."""

    main_gradients: Literal["fp32", "bf16"] = "fp32"
    """Gradients accumulated over microbatches."""

    reduce: Literal["fp32", "bf16"] = "fp32"
    """Sums of gradients over ranks."""

    moments: Literal["fp32", "bf16", "8bit"] = "fp32"
    """First and second moments of the optimizer; ``8bit`` has a scale for each block of a row."""

    first_last_layers_bf16: bool = False
    """With ``mxfp8``: whether the first and the last layers stay in bf16."""

    num_layers_at_start_in_bf16: int = Field(default=1, ge=0)
    """How many layers at the start stay in bf16, if ``first_last_layers_bf16``."""

    num_layers_at_end_in_bf16: int = Field(default=1, ge=0)
    """How many layers at the end stay in bf16, if ``first_last_layers_bf16``."""

    keep_bf16: tuple[str, ...] = ()
    """With ``mxfp8``: names of further modules that stay in bf16, such as ``*.self_attn`` or
    ``model.layers.0``; ``*`` stands for any text."""

    @model_validator(mode="after")
    def _nothing_is_kept_in_vain(self) -> PrecisionSettings:
        found: list[ConfigError] = []
        if self.compute != "mxfp8":
            problem = "only layers that would multiply in MXFP8 can be kept in bf16"
            remedy = "Leave it out, or set precision.compute to mxfp8"
            found += in_vain(self, ("first_last_layers_bf16", "keep_bf16"), problem, remedy)
        if not self.first_last_layers_bf16:
            names = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
            problem = "first_last_layers_bf16 is false, so no layer stays in bf16 by it"
            remedy = "Leave it out, or set precision.first_last_layers_bf16 to true"
            found += in_vain(self, names, problem, remedy)
        refuse(found)
        return self

    @model_validator(mode="after")
    def _rounds_what_is_bf16(self) -> PrecisionSettings:
        if self.rounding == "stochastic" and self.main_weights != "bf16":
            problem = "main weights in fp32 are not rounded"
            remedy = "Leave it out, or set precision.main_weights to bf16"
            refuse([ConfigError("rounding", self.rounding, problem, remedy)])
        return self
