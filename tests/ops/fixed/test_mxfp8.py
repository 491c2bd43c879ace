"""MXFP8 against vectors that torchao made, exact fractions, and itself on both operands."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.errors import ConfigError
from shoal.ops.fixed import PackedLinear, mxfp8
from shoal.ops.mxfp8 import dequantize, quantize
from tests.ops.fixed.company import assert_independent, same_bits

# Made by torchao 0.18: to_mx(inputs, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL).
# Zeros; blocks at, below and above 448 * 2**k; every E4M3 number, the middles between neighbours
# and what is beside the middles in bf16; random magnitudes.
VECTORS = np.load(Path(__file__).with_name("torchao_mxfp8.npz"))


def vectors() -> torch.Tensor:
    return torch.from_numpy(VECTORS["inputs"]).view(torch.bfloat16)


def test_quantization_equals_torchao() -> None:
    values, scales = quantize(vectors())
    assert np.array_equal(values.view(torch.uint8).numpy(), VECTORS["values"])
    assert np.array_equal(scales.numpy(), VECTORS["scales"])


def test_rows_are_quantized_like_weights() -> None:
    rows = vectors()
    expected = dequantize(*quantize(rows))
    assert same_bits(mxfp8.quantize_rows(rows), expected)
    assert same_bits(mxfp8.quantize_rows(rows.float()), expected)
    wide = torch.randn(40, 96) * torch.randn(40, 96).mul(9).exp2()
    assert same_bits(mxfp8.quantize_rows(wide), dequantize(*quantize(wide)))
    assert_independent(lambda chosen: mxfp8.quantize_rows(wide[chosen]), 40)


@pytest.mark.parametrize("power", [-100, -7, 0, 1, 90])
def test_the_scale_is_rounded_up(power: int) -> None:
    for most, exponent in (
        (448.0, power),
        (float(torch.nextafter(torch.tensor(448.0), torch.tensor(500.0))), power + 1),
        (512.0, power + 1),
        (224.0, power - 1),
        (224.5, power),
    ):
        block = torch.full((32,), 1.0)
        block[9] = -most
        block *= 2.0**power
        values, scales = quantize(block)
        assert int(scales[0]) - 127 == exponent
        scale = Fraction(2) ** exponent
        assert Fraction(float(block.abs().max())) <= 448 * scale
        assert Fraction(float(block.abs().max())) > 224 * scale
        # Each number is within half a step of E4M3 of what it was.
        for before, after in zip(block.tolist(), values.float().tolist(), strict=True):
            step = max(Fraction(abs(after)) / 8, Fraction(1, 512))
            assert abs(Fraction(before) / scale - Fraction(after)) <= step / 2


def test_a_block_of_zeros() -> None:
    values, scales = quantize(torch.zeros(2, 32))
    assert scales.tolist() == [[0], [0]]
    assert same_bits(dequantize(values, scales), torch.zeros(2, 32).bfloat16())
    assert same_bits(mxfp8.quantize_rows(torch.zeros(1, 32)), torch.zeros(1, 32).bfloat16())


def test_tiny_numbers_lose_bits_but_nothing_else() -> None:
    tiny = torch.full((1, 32), 2.0**-130)
    tiny[0, 5] = 2.0**-120
    result = dequantize(*quantize(tiny))
    assert float(result[0, 5]) == 2.0**-120
    assert float(result[0, 0]) == 0.0
    assert same_bits(mxfp8.quantize_rows(tiny), result)


def test_impossible_activations_spoil_their_block_alone() -> None:
    for bad in (float("inf"), -float("inf"), float("nan"), 3.3e38):
        rows = torch.ones(2, 64)
        rows[1, 40] = bad
        result = mxfp8.quantize_rows(rows)
        assert result[1, 32:].isnan().all()
        assert same_bits(result[1, :32], torch.ones(32).bfloat16())
        assert same_bits(result[0], torch.ones(64).bfloat16())
        with pytest.raises(ConfigError, match=r"Serve these weights in bf16 or fp32"):
            mxfp8.quantize_weight(rows)


def test_products_are_those_of_the_quantized_operands() -> None:
    weight, rows = vectors()[:90].reshape(45, 64), vectors()[40:].reshape(-1, 64)
    result = PackedLinear.pack(weight, kind="mxfp8")(rows, dtype=torch.float32)
    left, right = (dequantize(*quantize(x)) for x in (rows, weight))
    assert same_bits(result, PackedLinear.pack(right, kind="bf16")(left, dtype=torch.float32))
    exact = left.double() @ right.double().t()
    scale = left.double().abs() @ right.double().abs().t()
    assert bool(((result.double() - exact).abs() <= 1e-5 * scale).all())


@pytest.mark.parametrize("inner", [1, 33, 66, 95])
def test_the_last_block_may_be_short(inner: int) -> None:
    generator = torch.Generator().manual_seed(inner)
    weight, rows = (torch.randn(size, inner, generator=generator) for size in (45, 9))
    full = [torch.nn.functional.pad(x, (0, -inner % 32)) for x in (weight, rows)]
    result = PackedLinear.pack(weight, kind="mxfp8")(rows, dtype=torch.float32)
    assert same_bits(result, PackedLinear.pack(full[0], kind="mxfp8")(full[1], dtype=torch.float32))
    right, left = (dequantize(*quantize(x)).double() for x in full)
    torch.testing.assert_close(result.double(), left @ right.t(), rtol=1e-5, atol=1e-5)
