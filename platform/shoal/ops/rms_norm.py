"""Root-mean-square normalization."""

from __future__ import annotations

import torch
from torch.nn import functional

from shoal.ops.replaceable import replaceable


@replaceable
def rms_norm(inputs: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Scale the last dimension to unit mean square, then by ``weight``; same shape and dtype.

    The mean and the scaling are taken in fp32 or better. Source: Zhang and Sennrich,
    https://arxiv.org/abs/1910.07467.
    """
    return functional.rms_norm(inputs, weight.shape, weight, epsilon)
