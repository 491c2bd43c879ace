"""Number formats of a unit's buffers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shoal.errors import ConfigError

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Formats of weights and gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedPrecision:
    """Formats of weights, gradients and sums; raises ``ConfigError`` for an unsupported one."""

    main_weights: torch.dtype = torch.float32
    """Weights that the optimizer updates."""

    main_gradients: torch.dtype | None = torch.float32
    """Gradients over microbatches and for the optimizer; ``None`` is the compute format."""

    reduce: torch.dtype = torch.float32
    """Sums over ranks. Contributions travel in the format that backward made them in."""

    compute: torch.dtype | None = None
    """Weights in forward and backward; ``None`` is the format that the module was built with."""

    def __post_init__(self) -> None:
        for name in ("main_weights", "main_gradients", "reduce", "compute"):
            dtype = getattr(self, name)
            optional = name in ("main_gradients", "compute")
            if dtype not in SUPPORTED_DTYPES and not (optional and dtype is None):
                raise ConfigError(
                    f"precision.{name}",
                    dtype,
                    "buffers of this format are not supported",
                    f"Use one of {', '.join(map(str, SUPPORTED_DTYPES))}",
                )
