"""The gated activation of the MLP."""

from __future__ import annotations

import torch
from torch.nn import functional

from shoal.ops.replaceable import replaceable


@replaceable
def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``, elementwise (Shazeer, https://arxiv.org/abs/2002.05202)."""
    return functional.silu(gate) * up
