"""The formats in which an optimizer keeps running averages of gradients."""

from __future__ import annotations

from typing import Any

import torch

from shoal.ops import eight_bit
from shoal.training.updates import keep


class Moments:
    """Reads and writes moments, in fp32 on the outside, in a format in the optimizer's state.

    A moment in fp32 or bf16 is a tensor of the parameter's shape under its name. One in 8 bits is
    its codes under its name and their scales under ``<name>_scale`` (``shoal.ops.eight_bit``);
    where the parameter's rows are too narrow for that, it is in fp32. Rounding is to nearest.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        """``dtype`` is that of the kept tensors, ``torch.uint8`` for 8 bits."""
        self._dtype = dtype

    def create(self, state: dict[str, Any], name: str, parameter: torch.Tensor) -> None:
        """Let a parameter's state have a moment of zeros, unless it is there."""
        if name in state:
            return
        dtype = torch.float32 if self._dtype == torch.uint8 else self._dtype
        zeros = torch.zeros_like(parameter, dtype=dtype)
        if self._dtype == torch.uint8 and eight_bit.is_quantized(parameter.shape):
            scales = eight_bit.scale_name(name)
            state[name], state[scales] = eight_bit.quantize(zeros, signed=_is_signed(name))
        else:
            state[name] = zeros

    def read(self, state: dict[str, Any], name: str) -> torch.Tensor:
        """A moment in fp32; to be left as it is, as it may be the kept one itself."""
        kept: torch.Tensor = state[name]
        if kept.dtype != torch.uint8:
            return kept.float()
        scales = state[eight_bit.scale_name(name)]
        return eight_bit.dequantize(kept, scales, signed=_is_signed(name))

    def write(
        self, state: dict[str, Any], name: str, value: torch.Tensor, skip: torch.Tensor | None
    ) -> None:
        """Keep a moment, given in fp32, unless ``skip`` is set."""
        if state[name].dtype != torch.uint8:
            keep(state[name], value, skip)
            return
        codes, scales = eight_bit.quantize(value, signed=_is_signed(name))
        keep(state[name], codes, skip)
        keep(state[eight_bit.scale_name(name)], scales, skip)


def _is_signed(name: str) -> bool:
    return name != eight_bit.SECOND_MOMENT
