"""The linear layer."""

from __future__ import annotations

import torch
from torch import nn

from shoal import ops


class Linear(nn.Module):
    """``inputs @ weight.T + bias``; the weights' values are left to whoever fills the model."""

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(outputs, dtype=dtype)) if bias else None
        self.product = ops.linear

    def use_mxfp8(self) -> None:
        """Multiply in MXFP8 from now on."""
        self.product = ops.mxfp8_linear

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """``[..., inputs]`` to ``[..., outputs]``."""
        return self.product(inputs, self.weight, self.bias)
