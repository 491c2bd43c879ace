"""MXFP8 products against float64 products of operands that the specification's letter quantized."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from shoal import ops
from shoal.ops.mxfp8 import BLOCK, dequantize, quantize, rounded
from tests.ops.mx_reference import quantized

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def wild(rows: int, columns: int, seed: int) -> torch.Tensor:
    """bf16 numbers of magnitudes that differ by powers of two from row to row, some blocks zero."""
    draw = torch.Generator().manual_seed(seed)
    numbers = torch.randn(rows, columns, generator=draw)
    numbers *= torch.randint(-9, 9, (rows, 1), generator=draw).float().exp2()
    numbers *= torch.randint(-5, 5, (1, columns), generator=draw).float().exp2()
    numbers[: rows // 3, :32] = 0
    return numbers.bfloat16()


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 1), (33, 66), (64, 96), (70, 257), (0, 40), (1, 64)]
)
def test_rounding_is_the_specifications(rows: int, columns: int, dim: int) -> None:
    matrix = wild(rows, columns, 1)
    result = rounded(matrix, dim)
    assert result.shape[dim] == matrix.shape[dim] + -matrix.shape[dim] % BLOCK
    held, padding = result.split(
        [matrix.shape[dim], result.shape[dim] - matrix.shape[dim]], dim=dim
    )
    assert torch.equal(held.double(), quantized(matrix, dim))
    assert not padding.any()


def test_large_matrices_are_rounded_piece_by_piece() -> None:
    matrix = wild(1000, 700, 2)
    assert torch.equal(rounded(matrix, 0)[:1000], rounded(matrix.t().contiguous(), 1).t()[:1000])
    for start in range(0, 1000, 128):
        part = rounded(matrix[start : start + 128], 1)
        assert torch.equal(rounded(matrix, 1)[start : start + 128], part)


@pytest.mark.parametrize("dim", [0, 1])
def test_what_was_quantized_stays(dim: int) -> None:
    # A block whose largest number is rounded down gets a smaller scale the second time.
    matrix = wild(64, 96, 3)
    matrix[40, 40] = 1.76 * 2.0**20
    once = rounded(matrix, dim)
    assert torch.equal(rounded(once, dim), once)
    assert not torch.equal(rounded(once, 1 - dim), once)


def test_blocks_with_impossible_numbers_are_no_numbers() -> None:
    for bad in (float("inf"), float("nan"), 3.3e38):
        matrix = torch.ones(2, 64)
        matrix[1, 40] = bad
        values, scales = quantize(matrix)
        assert scales.tolist() == [[119, 119], [119, 255]]
        result = dequantize(values, scales)
        assert result[1, 32:].isnan().all()
        assert torch.equal(result[1, :32], torch.ones(32).bfloat16())
        assert torch.equal(result[0], torch.ones(64).bfloat16())


def one_rounding(result: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether ``result`` is ``left @ right``, summed in fp32 and rounded to bf16 once."""
    exact, size = left @ right, left.abs() @ right.abs()
    slack = exact.abs() * 2.0**-8 + size * 2.0**-20
    return result.dtype == torch.bfloat16 and bool(((result.double() - exact).abs() <= slack).all())


@pytest.mark.parametrize(
    ("tokens", "inner", "width"), [(7, 66, 130), (64, 64, 96), (1, 32, 33), (45, 257, 3)]
)
@pytest.mark.parametrize("biased", [False, True])
def test_linear(tokens: int, inner: int, width: int, biased: bool) -> None:
    inputs = wild(tokens, inner, 4).requires_grad_()
    weight = wild(width, inner, 5).requires_grad_()
    bias = torch.randn(width).bfloat16().requires_grad_() if biased else None
    gradient = wild(tokens, width, 6)
    output = ops.mxfp8_linear(inputs.view(1, tokens, inner), weight, bias)
    assert output.shape == (1, tokens, width)
    output.backward(gradient.unsqueeze(0))
    product = output.detach()[0]
    if bias is not None:
        product = ops.mxfp8_linear(inputs.detach(), weight.detach())
        assert torch.equal(output[0], product + bias)
        assert bias.grad is not None and bias.grad.dtype == torch.bfloat16
    assert inputs.grad is not None and weight.grad is not None
    x, w, dy = inputs.detach(), weight.detach(), gradient
    assert one_rounding(product, quantized(x, 1), quantized(w, 1).t())
    assert one_rounding(inputs.grad, quantized(dy, 1), quantized(w, 0))
    assert one_rounding(weight.grad, quantized(dy, 0).t(), quantized(x, 0))


@pytest.mark.parametrize("sizes", [(5, 0, 40, 1), (0, 0, 0, 7), (0, 0, 0, 0)])
def test_groups_are_linears_of_their_own(sizes: tuple[int, ...]) -> None:
    inner, width, tokens = 66, 20, sum(sizes)
    inputs = wild(tokens, inner, 7).requires_grad_()
    weight = wild(len(sizes) * width, inner, 8).requires_grad_()
    gradient = wild(tokens, width, 9)
    outputs = ops.mxfp8_grouped_linear(inputs, weight, sizes)
    outputs.backward(gradient)
    start = 0
    for group, size in enumerate(sizes):
        rows, columns = slice(start, start + size), slice(group * width, (group + 1) * width)
        start += size
        x = inputs.detach()[rows].requires_grad_()
        w = weight.detach()[columns].requires_grad_()
        expected = ops.mxfp8_linear(x, w)
        expected.backward(gradient[rows])
        assert inputs.grad is not None and weight.grad is not None
        assert torch.equal(outputs[rows], expected)
        assert torch.equal(inputs.grad[rows], torch.zeros_like(x) if x.grad is None else x.grad)
        own = torch.zeros_like(w) if w.grad is None else w.grad
        assert torch.equal(weight.grad[columns], own)
