"""Number formats of each stage of a training step."""

from __future__ import annotations

from typing import Literal

from shoal.config.section import Section


class PrecisionSettings(Section):
    """``precision``: formats of compute, weights, gradients, reduction and moments."""

    compute: Literal["auto", "fp32", "bf16", "mxfp8"] = "auto"
    """Forward and backward; ``auto`` is bf16 where the device has bf16 units and fp32 elsewhere."""

    parameter_gather: Literal["bf16", "mxfp8"] | None = None
    """Format in which sharded parameters travel; unset follows ``compute``."""

    main_weights: Literal["fp32", "bf16"] = "fp32"
    """Weights that the optimizer updates."""

    main_gradients: Literal["fp32", "bf16"] = "fp32"
    """Gradients accumulated over microbatches."""

    reduce: Literal["fp32", "bf16"] = "fp32"
    """Sums of gradients over ranks."""

    moments: Literal["fp32", "bf16"] = "fp32"
    """First and second moments of the optimizer."""
