"""Weights laid out for the tiles: panels of 64 columns, step by step.

A weight ``[N, K]`` becomes ``[N / 64, steps, 64]`` words of 4 bytes: the 64 output columns of a
panel side by side, each with one fp32 number or two bf16 numbers of K. A kernel that computes a
panel reads it once, from its first byte to its last. Columns and steps past N and K are zeros.

MXFP8 panels hold ``[N / 64, K / 2, 64]`` pairs of bytes and, apart, a scale per column and 32
numbers of K; see ``shoal.ops.mxfp8``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import functional

from shoal.errors import ConfigError
from shoal.ops.fixed import huge_pages, mxfp8
from shoal.ops.mxfp8 import BLOCK

Kind = Literal["fp32", "bf16", "mxfp8"]

COLUMNS = 64
"""Output columns of a panel."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Panels:
    """A packed weight, or several of one shape one after the other."""

    kind: Kind
    columns: int
    """N of one weight."""
    inner: int
    """K."""
    data: torch.Tensor
    scales: torch.Tensor | None = None
    """Scales of MXFP8, ``[panels, K / 32, 64]`` uint8."""
    small: torch.Tensor | None = None
    """``mxfp8.has_small`` of the panels."""

    @property
    def steps(self) -> int:
        """Steps of a row: fp32 numbers or pairs."""
        return self.data.shape[1]

    @property
    def per_weight(self) -> int:
        """Panels of one weight."""
        return -(-self.columns // COLUMNS)

    @property
    def row_bytes(self) -> int:
        """Bytes of an input row as the tiles read it."""
        return 4 * self.steps

    @property
    def num_bytes(self) -> int:
        """Memory that the weight takes."""
        parts = (self.data, self.scales, self.small)
        return sum(part.nbytes for part in parts if part is not None)

    @property
    def addresses(self) -> tuple[int, int, int]:
        """Where data, scales and flags are; 0 for what there is not."""
        parts = (self.data, self.scales, self.small)
        first, second, third = (0 if part is None else part.data_ptr() for part in parts)
        return first, second, third


def pack(weight: torch.Tensor, kind: Kind, *, count: int = 1) -> Panels:
    """Pack ``weight`` ``[count * N, K]``, floating point of any kind.

    What is on the meta device stays there, to tell how much memory the packed weight would take.
    Raises ``ConfigError`` where MXFP8 cannot hold a number of it.
    """
    rows, inner = weight.shape
    columns = rows // count
    weight = functional.pad(
        weight.detach().reshape(count, columns, inner), (0, 0, 0, -columns % COLUMNS)
    )
    scales = small = None
    if kind == "fp32":
        data = _by_steps(weight.float(), 1)
    elif kind == "bf16":
        data = _by_steps(functional.pad(weight.bfloat16(), (0, inner % 2)), 2)
    elif kind == "mxfp8":
        values, scales = mxfp8.quantize_weight(functional.pad(weight, (0, -inner % BLOCK)))
        data, scales = _by_steps(values.view(torch.uint8), 2), _by_steps(scales, 1).squeeze(-1)
        small = mxfp8.has_small(data)
    else:
        raise ConfigError("kind", kind, "no such kind of weights", "Use fp32, bf16 or mxfp8")
    return Panels(kind=kind, columns=columns, inner=inner, data=data, scales=scales, small=small)


def _by_steps(weight: torch.Tensor, per_step: int) -> torch.Tensor:
    """``[count, N, K]`` to ``[panels, steps, 64, numbers a step]``."""
    split = weight.reshape(-1, COLUMNS, weight.shape[2] // per_step, per_step).transpose(1, 2)
    if split.is_meta:
        return split.contiguous()
    return huge_pages.zeros(split.shape, split.dtype).copy_(split)
