"""What weights and activations are kept in."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch

from shoal.ops import fixed
from shoal.ops.fixed.tiles import HAS_BF16_PRODUCTS

Precision: TypeAlias = Literal["auto", "fp32", "bf16", "mxfp8"]
"""As ``serve.precision`` has it."""


def resolved_precision(precision: Precision) -> fixed.Kind:
    """``auto`` is bf16 where the CPU multiplies bf16 numbers, and fp32 elsewhere."""
    if precision == "auto":
        return "bf16" if HAS_BF16_PRODUCTS else "fp32"
    return precision


def activation_dtype(kind: fixed.Kind) -> torch.dtype:
    """Of what flows between the layers, and of keys and values."""
    return torch.float32 if kind == "fp32" else torch.bfloat16
