"""MXFP8 by the letter of the specification, in float64 and by search: slow, and no bit is shifted.

OCP Microscaling Formats (MX) 1.0, 5.3.1 (E4M3), 5.4.1 (E8M0) and 6.3 (conversion), with the scale
rounded up.
"""

from __future__ import annotations

import numpy as np
import torch

E4M3 = np.array(
    [m / 8 * 2.0**-6 for m in range(8)]
    + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)][:-1]
)
"""Every E4M3 number that is not negative, by its code."""


def quantized(matrix: torch.Tensor, dim: int) -> torch.Tensor:
    """``matrix`` as MXFP8 holds it in blocks along ``dim``, float64; no padding is left in it."""
    lines = matrix.double().movedim(dim, -1)
    result = torch.tensor(np.apply_along_axis(_line, -1, lines.numpy())) if lines.numel() else lines
    return result.movedim(-1, dim)


def _line(line: np.ndarray) -> np.ndarray:
    return np.concatenate([_block(line[start : start + 32]) for start in range(0, len(line), 32)])


def _block(block: np.ndarray) -> np.ndarray:
    most = np.abs(block).max()
    if most == 0:
        return block
    scale = 2.0**-117  # the smallest in use
    while scale * 448 < most:
        scale *= 2
    magnitudes = np.abs(block) / scale
    above = np.clip(np.searchsorted(E4M3, magnitudes), 1, len(E4M3) - 1)
    below = above - 1
    to_below, to_above = magnitudes - E4M3[below], E4M3[above] - magnitudes
    even = np.where(below % 2 == 0, below, above)
    codes = np.where(to_below < to_above, below, np.where(to_above < to_below, above, even))
    held: np.ndarray = np.sign(block) * E4M3[codes] * scale
    return held
