"""Matrix product with a weight."""

from __future__ import annotations

import torch
from torch.nn import functional

from shoal.ops.replaceable import replaceable


@replaceable
def linear(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``inputs @ weight.T + bias``: ``[..., K]`` and ``[N, K]`` give ``[..., N]``, in one dtype."""
    return functional.linear(inputs, weight, bias)
