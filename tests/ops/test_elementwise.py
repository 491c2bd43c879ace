"""Normalization, rotation and activation against their formulas in fp64."""

from __future__ import annotations

import torch
from torch.autograd import gradcheck

from shoal import ops


def test_rms_norm_equals_its_formula() -> None:
    torch.manual_seed(1)
    inputs, weight = torch.randn(3, 5, 66), torch.randn(66)
    wide = inputs.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    result = ops.rms_norm(inputs, weight, 1e-5).double()
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-6)
    half = ops.rms_norm(inputs.bfloat16(), weight.bfloat16(), 1e-5)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.double(), expected, rtol=0.02, atol=0.02)


def test_rotation_turns_pairs_and_keeps_their_length() -> None:
    torch.manual_seed(1)
    heads = torch.randn(2, 4, 3, 6, dtype=torch.float64)
    angles = torch.randn(1, 4, 3, dtype=torch.float64)
    result = ops.rotate(heads, angles.cos(), angles.sin())
    pairs = torch.complex(heads[..., :3], heads[..., 3:])
    turned = pairs * torch.polar(torch.ones_like(angles), angles).unsqueeze(2)
    torch.testing.assert_close(result, torch.cat((turned.real, turned.imag), dim=-1))


def test_rotation_gradient() -> None:
    torch.manual_seed(1)
    heads = torch.randn(1, 3, 2, 4, dtype=torch.float64, requires_grad=True)
    angles = torch.randn(1, 3, 2, dtype=torch.float64)
    assert gradcheck(ops.rotate, (heads, angles.cos(), angles.sin()))


def test_swiglu_and_linear() -> None:
    gate, up = torch.randn(4, 7), torch.randn(4, 7)
    torch.testing.assert_close(ops.swiglu(gate, up), gate * gate.sigmoid() * up)
    weight, bias = torch.randn(5, 7), torch.randn(5)
    torch.testing.assert_close(ops.linear(gate, weight, bias), gate @ weight.t() + bias)
