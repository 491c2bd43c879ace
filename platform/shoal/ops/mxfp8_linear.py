"""Matrix products in MXFP8, forward and backward, one or ragged groups of rows.

    forward           Y = X W^T      sums over K    X, W quantized along K
    input gradient    dX = dY W      sums over N    dY, W quantized along N
    weight gradient   dW = dY^T X    sums over T    dY, X quantized along T

Each operand of each product is quantized along the dimension that the product sums over, from
what the step before left in bf16; so X, W and dY are quantized twice each, in two directions. Where
a size is no multiple of 32, the last block is filled up with zeros, which add nothing.

The products are emulated exactly: quantized numbers are multiplied in bf16, which holds them
without rounding, and summed in fp32 (see ``shoal.ops.mxfp8``). Results and gradients leave in bf16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from shoal.ops.grouped_linear import groups_of
from shoal.ops.mxfp8 import rounded


class _GroupedLinear(torch.autograd.Function):
    """The three products for each group."""

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, sizes: tuple[int, ...]
    ) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.sizes = sizes
        width = weight.shape[0] // len(sizes)
        outputs = inputs.new_empty(inputs.shape[0], width)
        for rows, columns in groups_of(sizes, width):
            left, right = rounded(inputs[rows], 1), rounded(weight[columns], 1)
            torch.mm(left, right.t(), out=outputs[rows])
        return outputs

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, gradient: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        # Where weights travel in MXFP8, the memory of ``weight`` now holds them in blocks along N.
        inputs, weight = ctx.saved_tensors
        gradient = gradient.contiguous()
        groups = list(groups_of(ctx.sizes, weight.shape[0] // len(ctx.sizes)))
        input_gradient = weight_gradient = None
        if ctx.needs_input_grad[0]:
            input_gradient = torch.empty_like(inputs)
            for rows, columns in groups:
                left, right = rounded(gradient[rows], 1), rounded(weight[columns], 0)
                torch.mm(left, right, out=input_gradient[rows])
        if ctx.needs_input_grad[1]:
            weight_gradient = torch.zeros_like(weight)  # groups without a row stay at zero
            for rows, columns in groups:
                left, right = rounded(gradient[rows], 0), rounded(inputs[rows], 0)
                torch.mm(left.t(), right, out=weight_gradient[columns])
        return input_gradient, weight_gradient, None


def mxfp8_grouped_linear(
    inputs: torch.Tensor, weight: torch.Tensor, sizes: Sequence[int]
) -> torch.Tensor:
    """As ``grouped_linear``, in MXFP8; all of it bf16.

    Blocks begin with each group: no rows and no weights of two groups share a scale.
    """
    outputs: torch.Tensor = _GroupedLinear.apply(inputs.contiguous(), weight, tuple(sizes))  # type: ignore[no-untyped-call]
    return outputs


def mxfp8_linear(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """As ``linear``, in MXFP8; all of it bf16. The bias is added to the product in bf16."""
    rows = inputs.flatten(0, -2)
    outputs = mxfp8_grouped_linear(rows, weight, (rows.shape[0],))
    outputs = outputs.view(*inputs.shape[:-1], weight.shape[0])
    return outputs if bias is None else outputs + bias
