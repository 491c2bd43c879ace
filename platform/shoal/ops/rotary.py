"""Rotation of queries and keys by their positions."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from shoal.ops.replaceable import replaceable


class _Rotate(torch.autograd.Function):
    """The rotation; its gradient is the rotation back, so nothing but the angles is kept."""

    @staticmethod
    def forward(
        ctx: Any, heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(cosine, sine)
        return _rotated(heads, cosine, sine)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cosine, sine = ctx.saved_tensors
        return _rotated(gradient, cosine, -sine), None, None


def _rotated(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    first, second = heads.chunk(2, dim=-1)
    cosine, sine = cosine.unsqueeze(-2), sine.unsqueeze(-2)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


@replaceable
def cosine_and_sine(angles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both of ``angles``, in radians and fp32; like ``angles``."""
    return angles.cos(), angles.sin()


@replaceable
def rotate(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotate each pair (i, i + D/2) of every head by the angle of its position.

    ``heads`` is ``[B, S, heads, D]``, ``cosine`` and ``sine`` are ``[B or 1, S, D/2]`` of the same
    dtype; the result is like ``heads``. Source: Su et al., https://arxiv.org/abs/2104.09864, in
    the order of two halves that Hugging Face weights have.
    """
    rotated: torch.Tensor = _Rotate.apply(heads, cosine, sine)  # type: ignore[no-untyped-call]
    return rotated
