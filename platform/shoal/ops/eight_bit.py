"""Moments in 8 bits: blocks of a row share a scale, codes stand for unevenly spaced numbers.

Dettmers, Lewis, Shleifer and Zettlemoyer, "8-bit Optimizers via Block-wise Quantization" (ICLR
2022). A code is read like a floating-point number with as many exponent bits as it needs: zeros in
front count powers of ten, a one ends them, and what is left divides that decade evenly::

    seven or eight bits     0 0 0 1 f f f f      10^-3 (0.1 + 0.9 (f + 1/2) / 2^4)

which spans seven decades and is fine near the largest number. Moments of neighbouring elements
differ by more than the formats of fp8 span, and a fixed-point format loses the small ones.

Blocks are runs of at most 256 elements of one row, as equal as can be. Rows are what ranks divide
parameters by, so a block's elements, and with them every bit, do not depend on the layout. A tensor
with narrow rows, such as a vector, is not quantized: its scales would outweigh its codes.

Signed numbers are coded as they are. Of second moments, which are never negative, the square root
is: the update divides by it, and its decades are half as many. A positive one never becomes 0,
which would be divided by (Li, Chen and Zhu, "Memory Efficient Optimizers with 4-bit States",
NeurIPS 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import torch
from torch.nn import functional

BLOCK = 256
"""Most elements of a block."""

MIN_WIDTH = 16
"""Fewest elements in a row of a tensor that is quantized."""

_DECADES = 7

SECOND_MOMENT = "exp_avg_sq"
"""Name of second moments in an optimizer's state; every other name is of signed numbers."""


def scale_name(name: str) -> str:
    """Where an optimizer's state has the scales of a moment whose codes it has under ``name``."""
    return f"{name}_scale"


def is_quantized(shape: Sequence[int]) -> bool:
    """Whether a tensor of this shape is kept in 8 bits; depends on its rows' shape alone."""
    return len(shape) >= 2 and torch.Size(shape[1:]).numel() >= MIN_WIDTH


def num_blocks(shape: Sequence[int]) -> int:
    """Blocks, and scales, of each row."""
    return -(-torch.Size(shape[1:]).numel() // BLOCK)


def quantize(values: torch.Tensor, *, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (uint8, the shape of ``values``) and scales (fp32, ``[rows, blocks]``) of fp32 values.

    ``values`` has any number of rows, also none, of ``MIN_WIDTH`` elements or more. Unless
    ``signed`` they are second moments.
    """
    blocks = _blocks(values if signed else values.sqrt())
    scales = blocks.abs().amax(dim=2)
    # A block of zeros has the scale 0, and codes of zero by any other.
    scaled = blocks / torch.where(scales == 0, 1.0, scales).unsqueeze(2)
    codes = _nearest(scaled, signed=signed)
    if not signed:
        codes = torch.where(scaled > 0, codes.clamp(min=1), codes)
    return _whole_rows(codes, values.shape), scales


def dequantize(codes: torch.Tensor, scales: torch.Tensor, *, signed: bool) -> torch.Tensor:
    """The values, fp32, of what ``quantize`` made."""
    numbers = _numbers(signed, codes.device).index_select(0, codes.flatten().int())
    blocks = _blocks(numbers.view(codes.shape))
    values = _whole_rows(blocks * scales.unsqueeze(2), codes.shape)
    return values if signed else values.square()


def _nearest(scaled: torch.Tensor, *, signed: bool) -> torch.Tensor:
    """The code of the nearest number, uint8; the lower one of two.

    No two borders between codes share the upper half of their bits, so that half and a comparison
    tell: a search takes several times as long.
    """
    halves = (scaled.view(torch.int32) >> 16).bitwise_and_(0xFFFF).flatten()
    lowest = _lowest(signed, scaled.device).index_select(0, halves)
    border = _borders(signed, scaled.device).index_select(0, lowest.int())
    return (lowest + (scaled.flatten() > border)).view(scaled.shape)


def _blocks(values: torch.Tensor) -> torch.Tensor:
    """``[rows, blocks, elements]``, the last block of a row filled up with zeros."""
    width, count = values.shape[1:].numel(), num_blocks(values.shape)
    length = -(-width // count)
    rows = values.reshape(values.shape[0], width)
    filled: torch.Tensor = functional.pad(rows, (0, count * length - width))
    return filled.view(len(filled), count, length)


def _whole_rows(blocks: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """What ``_blocks`` took apart."""
    return blocks.flatten(1).narrow(1, 0, shape[1:].numel()).reshape(shape)


@cache
def _numbers(signed: bool, device: torch.device) -> torch.Tensor:
    """What each code stands for, increasing, fp32; the tensor is never written to."""
    bits = 7 if signed else 8
    positive = [1.0]
    for zeros in range(_DECADES):
        steps = 2 ** (bits - 1 - zeros)
        positive += [10.0**-zeros * (0.1 + 0.9 * (f + 0.5) / steps) for f in range(steps)]
    negative = [-number for number in positive if number < 1] if signed else []
    return torch.tensor(sorted([*negative, 0.0, *positive]), device=device)


@cache
def _borders(signed: bool, device: torch.device) -> torch.Tensor:
    """Where the nearest number is no longer that of a code but of the next one, ``[256]``."""
    numbers = _numbers(signed, torch.device("cpu")).double().tolist()
    return torch.tensor([*((a + b) / 2 for a, b in pairwise(numbers)), torch.inf], device=device)


@cache
def _lowest(signed: bool, device: torch.device) -> torch.Tensor:
    """The lowest code of any fp32 number with each upper half of bits, ``[65536]``, uint8."""
    halves = torch.arange(2**16, dtype=torch.int32)
    bits = (halves << 16) | (halves >= 2**15).int() * 0xFFFF  # of negative ones the largest
    codes = torch.bucketize(bits.view(torch.float32), _borders(signed, bits.device)[:-1])
    return codes.to(torch.uint8).to(device)
