"""Packed linear layers: rows independent, close to fp64, of any shape."""

from __future__ import annotations

import pytest
import torch

from shoal.errors import ConfigError
from shoal.ops.fixed import PackedLinear
from shoal.ops.fixed.probes import hard_rows
from shoal.ops.on_threads import on_threads
from tests.ops.fixed.company import assert_independent, same_bits

BF16, FP32 = torch.bfloat16, torch.float32
SHAPES = [(64, 64), (257, 66), (70, 33), (1, 1), (130, 515)]


def weights(columns: int, inner: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(columns)
    return (
        torch.randn(columns, inner, generator=generator) * 0.1,
        torch.randn(columns, generator=generator),
    )


@pytest.mark.parametrize(("columns", "inner"), SHAPES)
@pytest.mark.parametrize(
    ("kind", "dtype"), [("fp32", FP32), ("bf16", BF16), ("mxfp8", BF16), ("mxfp8", FP32)]
)
def test_rows_do_not_depend_on_each_other(
    kind: str, dtype: torch.dtype, columns: int, inner: int
) -> None:
    weight, bias = weights(columns, inner)
    linear = PackedLinear.pack(weight, bias, kind=kind)  # type: ignore[arg-type]
    rows = hard_rows(24, inner, dtype)
    assert_independent(lambda chosen: linear(rows[chosen]), 24)


@pytest.mark.parametrize(("columns", "inner"), SHAPES)
def test_results_are_those_of_fp64(columns: int, inner: int) -> None:
    weight, bias = weights(columns, inner)
    rows = torch.randn(9, inner, generator=torch.Generator().manual_seed(1))
    exact = rows.double() @ weight.double().t() + bias.double()
    singles = PackedLinear.pack(weight, bias, kind="fp32")(rows)
    torch.testing.assert_close(singles.double(), exact, rtol=1e-5, atol=1e-5)
    half, half_weight = rows.bfloat16(), weight.bfloat16()
    exact = half.double() @ half_weight.double().t() + bias.double()
    packed = PackedLinear.pack(half_weight, bias, kind="bf16")
    # Unrounded sums are exact but for fp32; a rounded result is their nearest bf16.
    wide = packed(half, dtype=FP32)
    torch.testing.assert_close(wide.double(), exact, rtol=1e-5, atol=1e-5)
    assert same_bits(packed(half), wide.bfloat16())


def test_a_layer_without_bias_and_rows_with_strides() -> None:
    weight, _ = weights(65, 40)
    linear = PackedLinear.pack(weight, kind="bf16")
    wide = torch.randn(5, 120).bfloat16()
    rows = wide[:, 40:80]
    assert rows.stride(0) == 120
    assert same_bits(linear(rows), linear(rows.contiguous()))
    turned = wide[:, :40].t().contiguous().t()
    assert same_bits(linear(turned), linear(wide[:, :40].contiguous()))
    torch.testing.assert_close(linear(rows), rows @ weight.bfloat16().t(), rtol=0.02, atol=0.02)


def test_many_rows_are_cut_into_chunks() -> None:
    weight, bias = weights(64, 32)  # a single panel, so that rows make the tasks
    linear = PackedLinear.pack(weight, bias, kind="bf16")
    rows = torch.randn(1001, 32).bfloat16()
    with on_threads(2):
        many = linear(rows)
    with on_threads(1):
        assert same_bits(torch.cat([linear(piece) for piece in rows.split(13)]), many)


def test_no_rows_give_no_rows() -> None:
    weight, _ = weights(64, 32)
    for kind, dtype in (("fp32", FP32), ("bf16", BF16), ("mxfp8", BF16)):
        linear = PackedLinear.pack(weight, kind=kind)  # type: ignore[arg-type]
        assert linear(torch.empty(0, 32, dtype=dtype)).shape == (0, 64)


@pytest.mark.parametrize("inner", [1, 32])
def test_packed_weights_outlive_what_they_were_packed_from(inner: int) -> None:
    weight, bias = weights(64, inner)
    linear = PackedLinear.pack(weight, bias, kind="fp32")
    rows = torch.randn(3, inner)
    before = linear(rows)
    weight.zero_()
    bias.zero_()
    assert same_bits(linear(rows), before)
    assert (linear.kind, linear.shape) == ("fp32", (64, inner))


def test_memory_of_packed_weights() -> None:
    weight, _ = weights(128, 96)
    assert PackedLinear.pack(weight, kind="fp32").panels.num_bytes == 4 * 128 * 96
    assert PackedLinear.pack(weight, kind="bf16").panels.num_bytes == 2 * 128 * 96
    # A byte a number, a scale for 32, and a flag for 32 numbers of 64 columns.
    num_bytes = 128 * 96 + 128 * 96 // 32 + 128 * 96 // 32 // 64
    assert PackedLinear.pack(weight, kind="mxfp8").panels.num_bytes == num_bytes


def test_refusals() -> None:
    weight, _ = weights(64, 32)
    with pytest.raises(ConfigError, match=r"Use fp32, bf16 or mxfp8"):
        PackedLinear.pack(weight, kind="int8")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"fp32 weights take torch.float32 rows"):
        PackedLinear.pack(weight, kind="fp32")(torch.zeros(1, 32).bfloat16())
    with pytest.raises(ValueError, match=r"rows of 32"):
        PackedLinear.pack(weight, kind="fp32")(torch.zeros(1, 31))
    for bad in (float("inf"), float("nan"), 3.2e38):
        with pytest.raises(ConfigError, match=r"MXFP8 holds finite numbers"):
            PackedLinear.pack(weight.index_fill(1, torch.tensor([3]), bad), kind="mxfp8")
