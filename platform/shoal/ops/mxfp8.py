"""The MXFP8 format: E4M3 numbers in blocks of 32 that share a power of two as their scale.

Source: OCP Microscaling Formats (MX) specification 1.0, with the scale rounded up as Megatron Core
and Transformer Engine do it: the smallest power of two that is no less than ``amax / 448``, so that
no number of the block is clipped. A block runs along the dimension that a product sums over, so a
matrix that is used in two directions is quantized twice.

A number of the format is a sum of at most 4 bits times a power of two, which bf16 holds without
rounding; so a product of ``rounded`` operands with sums in fp32 is the format's own product.
Quantization changes nothing in what was quantized along the same dimension before.

Edges. A block of zeros has the exponent 0 as its scale. Otherwise scales below 2**-117 are not
used, because bf16 products take numbers below 2**-126 as zero: blocks whose largest number is below
448 * 2**-117 (2.7e-33) are quantized as if it were that. A number above 448 * 2**119 (3e38), an
infinite one or none at all makes its whole block not a number, with the exponent 255.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

BLOCK = 32
"""Numbers that share a scale."""

LEAST, MOST = 127 - 117, 127 + 119
"""Smallest and largest scale in use, as biased exponents (E8M0)."""

LIMIT = 448.0 * 2.0**119
"""The largest number that can be quantized; 448 is the largest of E4M3."""

_NO_NUMBER = 255
"""The exponent of blocks that are not numbers."""

PIECE = 1 << 18
"""Elements that are quantized at a time, which bounds the scratch memory."""


def quantize(numbers: torch.Tensor, dim: int = -1) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize floating point ``numbers`` in blocks along ``dim``, whose size is a multiple of 32.

    Returns E4M3 (float8_e4m3fn) of the same shape and the biased exponents of the scales (uint8,
    E8M0), of which ``dim`` has one for each block. Nothing is read by the host.
    """
    axis = dim % numbers.ndim
    size = numbers.shape[axis]
    blocks = numbers.detach().float().unflatten(axis, (size // BLOCK, BLOCK))
    exponents = _exponents(blocks.abs().amax(dim=axis + 1, keepdim=True))
    scales = _powers(exponents.clamp(LEAST)).where(exponents != _NO_NUMBER, torch.nan)
    values = (blocks / scales).to(torch.float8_e4m3fn).flatten(axis, axis + 1)
    return values, exponents.squeeze(axis + 1).to(torch.uint8)


def dequantize(values: torch.Tensor, scales: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """What ``quantize`` gave for the same ``dim``, as bf16, exactly."""
    axis = dim % values.ndim
    blocks = values.float().unflatten(axis, (scales.shape[axis], BLOCK))
    numbers: torch.Tensor = blocks * _powers(scales.int()).unsqueeze(axis + 1)
    return numbers.flatten(axis, axis + 1).bfloat16()


def rounded(matrix: torch.Tensor, dim: int) -> torch.Tensor:
    """``matrix`` as MXFP8 holds it in blocks along ``dim``, in bf16.

    Any number of rows and columns; ``dim`` grows to a multiple of 32, with zeros.
    """
    rows, columns = matrix.shape
    along_rows = dim % 2 == 0
    shape = (rows + -rows % BLOCK, columns) if along_rows else (rows, columns + -columns % BLOCK)
    result = torch.empty(shape, dtype=torch.bfloat16, device=matrix.device)
    for place in pieces(matrix):
        piece = matrix[place]
        padding = (0, 0, 0, -piece.shape[0] % BLOCK) if along_rows else (0, -columns % BLOCK)
        piece = functional.pad(piece, padding) if any(padding) else piece
        result[place.start : place.start + piece.shape[0]] = dequantize(*quantize(piece, dim), dim)
    return result


def pieces(matrix: torch.Tensor) -> Iterator[slice]:
    """Rows of a matrix in whole blocks, so few at a time that quantizing them takes little memory.

    The last block may be cut short.
    """
    rows, columns = matrix.shape
    step = max(PIECE // max(columns, 1) // BLOCK, 1) * BLOCK
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _exponents(most: torch.Tensor) -> torch.Tensor:
    """Biased exponents of the scales for the largest magnitudes, int32.

    ``amax = m * 2**e`` with m in [1, 2), and 448 = 1.75 * 2**8: the scale is ``2**(e - 8)`` where m
    is at most 1.75 and ``2**(e - 7)`` above.
    """
    bits = most.contiguous().view(torch.int32)
    above = ((bits & 0x7FFFFF) > 0x600000).int()
    exponents = (bits >> 23) - 8 + above
    exponents = exponents.clamp(LEAST).where(exponents <= MOST, _NO_NUMBER)
    return exponents.where(most != 0, 0)


def _powers(exponents: torch.Tensor) -> torch.Tensor:
    return (exponents << 23).view(torch.float32)
