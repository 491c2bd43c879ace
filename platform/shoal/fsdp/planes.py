"""Matrices in MXFP8 as bytes that can be split wherever no block of 32 rows is.

A matrix is quantized twice, for the products of forward in blocks along its columns and for those
of backward in blocks along its rows. Each is a plane of bytes in which a block's scale follows its
32 numbers::

    forward     [N, K / 32, 33]     of each row, block by block: 32 numbers, their scale
    backward    [N / 32, 33, K]     of each 32 rows: the rows, and a row of scales

So a plane takes 33/32 bytes an element, and 32 rows of the matrix are one run of either plane.
"""

from __future__ import annotations

from enum import IntEnum

import torch

from shoal.fsdp.layout import GlobalLayout
from shoal.ops.mxfp8 import BLOCK, dequantize, pieces, quantize

WIDE = BLOCK + 1
"""Bytes of a block."""


class Plane(IntEnum):
    """Which products a plane serves: those that sum over this dimension of the matrix."""

    FORWARD = 1
    BACKWARD = 0


def plane_layout(layout: GlobalLayout, plane: Plane) -> GlobalLayout:
    """Where the bytes of a plane lie, for matrices laid out in blocks of 32 rows by ``layout``."""
    shapes = []
    for rows, columns in layout.shapes:
        wide = rows // BLOCK * WIDE, columns // BLOCK * WIDE
        is_forward = plane is Plane.FORWARD
        shapes.append(torch.Size([rows, wide[1]] if is_forward else [wide[0], columns]))
    return GlobalLayout(
        shapes=tuple(shapes),
        offsets=tuple(offset // BLOCK * WIDE for offset in layout.offsets),
        size=layout.size // BLOCK * WIDE,
    )


def encode(matrix: torch.Tensor, plane: Plane, out: torch.Tensor) -> None:
    """Quantize whole blocks of 32 rows of a bf16 or fp32 matrix into ``out``, rows of a plane.

    They are rounded to bf16 first, so that it makes no difference to the values whether weights
    are quantized before they travel or, after they travelled in bf16, by each product.
    """
    blocks = _blocks(out, plane)
    for rows in pieces(matrix):
        values, scales = quantize(matrix[rows].bfloat16(), plane)
        place = blocks[_block_rows(rows, plane)]
        place[_NUMBERS[plane]] = values.view(torch.uint8).unflatten(plane, (-1, BLOCK))
        place[_SCALE[plane]] = scales


def decode(source: torch.Tensor, plane: Plane, out: torch.Tensor) -> None:
    """Write what rows of a plane stand for to ``out``, a bf16 matrix, exactly."""
    blocks = _blocks(source, plane)
    for rows in pieces(out):
        place = blocks[_block_rows(rows, plane)]
        values = place[_NUMBERS[plane]].flatten(plane, plane + 1).view(torch.float8_e4m3fn)
        out[rows] = dequantize(values, place[_SCALE[plane]], plane)


_NUMBERS = {
    Plane.FORWARD: (slice(None), slice(None), slice(BLOCK)),
    Plane.BACKWARD: (slice(None), slice(BLOCK)),
}
_SCALE = {
    Plane.FORWARD: (slice(None), slice(None), BLOCK),
    Plane.BACKWARD: (slice(None), BLOCK),
}


def _blocks(rows: torch.Tensor, plane: Plane) -> torch.Tensor:
    """Rows of a plane by block, three-dimensional."""
    blocks: torch.Tensor = rows.unflatten(plane, (rows.shape[plane] // WIDE, WIDE))
    return blocks


def _block_rows(rows: slice, plane: Plane) -> slice:
    """Where rows of the matrix are in the first dimension of the plane's blocks."""
    step = 1 if plane is Plane.FORWARD else BLOCK
    return slice(rows.start // step, -(-rows.stop // step))
