"""The dense MLP, which is also the shared expert."""

from __future__ import annotations

import torch
from torch import nn

from shoal import ops
from shoal.models.linear import Linear


class MLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, hidden: int, width: int, dtype: torch.dtype, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden, width, dtype, bias=bias)
        self.up_proj = Linear(hidden, width, dtype, bias=bias)
        self.down_proj = Linear(width, hidden, dtype, bias=bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[..., H]`` to the same."""
        activated = ops.swiglu(self.gate_proj(hidden), self.up_proj(hidden))
        output: torch.Tensor = self.down_proj(activated)
        return output
