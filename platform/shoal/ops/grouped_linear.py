"""Matrix products of ragged groups of rows, each group with its own weight."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable


def groups_of(sizes: Sequence[int], width: int) -> Iterator[tuple[slice, slice]]:
    """Rows of the inputs and rows of the weight, for each group that is not empty."""
    start = 0
    for group, size in enumerate(sizes):
        if size:
            yield slice(start, start + size), slice(group * width, (group + 1) * width)
        start += size


class _GroupedLinear(torch.autograd.Function):
    """Written out because the gradient of each slice of the weight would be as big as the whole."""

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, sizes: tuple[int, ...]
    ) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.sizes = sizes
        width = weight.shape[0] // len(sizes)
        outputs = inputs.new_empty(inputs.shape[0], width)
        for rows, columns in groups_of(sizes, width):
            torch.mm(inputs[rows], weight[columns].t(), out=outputs[rows])
        return outputs

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, gradient: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        inputs, weight = ctx.saved_tensors
        gradient = gradient.contiguous()
        groups = list(groups_of(ctx.sizes, weight.shape[0] // len(ctx.sizes)))
        input_gradient = weight_gradient = None
        if ctx.needs_input_grad[0]:
            input_gradient = torch.empty_like(inputs)
            for rows, columns in groups:
                torch.mm(gradient[rows], weight[columns], out=input_gradient[rows])
        if ctx.needs_input_grad[1]:
            weight_gradient = torch.zeros_like(weight)  # experts without a token stay at zero
            for rows, columns in groups:
                torch.mm(gradient[rows].t(), inputs[rows], out=weight_gradient[columns])
        return input_gradient, weight_gradient, None


def grouped_linear(
    inputs: torch.Tensor, weight: torch.Tensor, sizes: Sequence[int]
) -> torch.Tensor:
    """``inputs[group g] @ weight[g].T`` for each group of consecutive rows.

    ``inputs`` is ``[R, K]``, ``sizes`` the rows of each of the E groups (zero is allowed, R their
    sum), ``weight`` ``[E * N, K]`` with group g in rows ``g * N`` to ``(g + 1) * N``; the result is
    ``[R, N]``. One dtype throughout.
    """
    outputs: torch.Tensor = _GroupedLinear.apply(inputs.contiguous(), weight, tuple(sizes))  # type: ignore[no-untyped-call]
    return outputs
