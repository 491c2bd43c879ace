"""The normalization layer."""

from __future__ import annotations

import torch
from torch import nn

from shoal import ops


class RMSNorm(nn.Module):
    """Root-mean-square normalization of the last dimension, with a learned scale."""

    def __init__(self, size: int, epsilon: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """``[..., size]`` to the same."""
        return ops.rms_norm(inputs, self.weight, self.epsilon)
