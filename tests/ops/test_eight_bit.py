"""Moments in 8 bits against the definition of their codes, bit by bit."""

from __future__ import annotations

import pytest
import torch

from shoal.ops import eight_bit

SHAPES = [(5, 66), (3, 576), (2, 257), (4, 4, 5), (0, 66), (1, 16)]


def _values(shape: tuple[int, ...]) -> torch.Tensor:
    draw = torch.Generator().manual_seed(7)
    return torch.randn(shape, generator=draw) * 10 ** (4 * torch.rand(shape, generator=draw) - 4)


def _number(code: int, bits: int) -> float:
    """A positive number from its ``bits`` bits: zeros count decades, a one, the fraction."""
    text = f"{code:0{bits}b}"
    zeros = len(text) - len(text.lstrip("0"))
    if zeros > 6:
        return 0.0 if code == 0 else 1.0  # what is left over
    fraction = text[zeros + 1 :]
    share = (int(fraction, 2) + 0.5) / 2 ** len(fraction) if fraction else 0.5
    return 10.0**-zeros * (0.1 + 0.9 * share)


def _numbers(signed: bool) -> torch.Tensor:
    if not signed:
        return torch.tensor(sorted(_number(code, 8) for code in range(256)), dtype=torch.float64)
    positive = [_number(code, 7) for code in range(1, 128)]
    numbers = [0.0, 1.0, *positive, *(-number for number in positive)]
    return torch.tensor(sorted(numbers), dtype=torch.float64)


def _blocks(shape: tuple[int, ...]) -> list[slice]:
    """Where the blocks of a row begin and end."""
    width = torch.Size(shape[1:]).numel()
    count = -(-width // 256)
    length = -(-width // count)
    return [slice(start, min(start + length, width)) for start in range(0, width, length)]


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_block_has_the_nearest_numbers(shape: tuple[int, ...], signed: bool) -> None:
    values = _values(shape)
    values = values if signed else values.square()
    codes, scales = eight_bit.quantize(values, signed=signed)
    restored = eight_bit.dequantize(codes, scales, signed=signed)
    assert codes.shape == restored.shape == values.shape and codes.dtype == torch.uint8
    assert scales.shape == (shape[0], len(_blocks(shape))) and scales.dtype == torch.float32
    numbers = _numbers(signed)
    assert len(numbers) == 256
    rows = (values if signed else values.sqrt()).flatten(1) if shape[0] else values.new_empty(0, 16)
    back = (restored if signed else restored.sqrt()).reshape(rows.shape)
    for number, block in enumerate(_blocks(shape) if shape[0] else []):
        part, largest = rows[:, block].double(), rows[:, block].abs().amax(dim=1)
        assert torch.equal(scales[:, number], largest)
        scaled = part / largest.double().unsqueeze(1)
        nearest = (scaled.unsqueeze(2) - numbers).abs().argmin(dim=2)
        if not signed:
            nearest = torch.where(scaled > 0, nearest.clamp(min=1), nearest)
        expected = numbers[nearest] * largest.double().unsqueeze(1)
        torch.testing.assert_close(back[:, block].double(), expected, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("signed", [True, False])
def test_every_number_and_every_border_finds_its_code(signed: bool) -> None:
    numbers = _numbers(signed).float()
    borders = ((numbers[1:].double() + numbers[:-1].double()) / 2).float()
    beside = torch.cat(
        [borders, borders.nextafter(torch.tensor(2.0)), borders.nextafter(torch.tensor(-2.0))]
    )
    row = torch.cat([numbers, beside])
    for part in row.split(15):
        given = torch.cat([part, torch.ones(16)]).unsqueeze(0)  # a block whose scale is 1
        values = given if signed else given.square()
        codes, _ = eight_bit.quantize(values, signed=signed)
        scaled = given if signed else values.sqrt()
        expected = torch.bucketize(scaled, borders)
        if not signed:
            expected = torch.where(scaled > 0, expected.clamp(min=1), expected)
        assert torch.equal(codes.long(), expected)


def test_rows_do_not_know_of_each_other() -> None:
    values = _values((50, 300))
    codes, scales = eight_bit.quantize(values, signed=True)
    for start, stop in ((0, 1), (1, 18), (18, 18), (18, 50)):
        part = eight_bit.quantize(values[start:stop], signed=True)
        assert torch.equal(part[0], codes[start:stop]) and torch.equal(part[1], scales[start:stop])


def test_zeros_stay_and_what_is_positive_does_not_become_one() -> None:
    values = torch.zeros(2, 300)
    values[1] = torch.cat([torch.tensor([1.0]), torch.full((298,), 1e-30), torch.zeros(1)])
    for signed in (True, False):
        restored = eight_bit.dequantize(*eight_bit.quantize(values, signed=signed), signed=signed)
        assert torch.equal(restored[0], values[0])
        assert restored[1, 0] == 1.0 and restored[1, -1] == 0.0
        small = restored[1, 1:150]
        assert (small == 0).all() if signed else ((0 < small) & (small < 2e-13)).all()


def test_narrow_tensors_are_left_alone() -> None:
    assert not eight_bit.is_quantized((400,)) and not eight_bit.is_quantized((400, 15))
    assert eight_bit.is_quantized((0, 16)) and eight_bit.is_quantized((3, 4, 4))
