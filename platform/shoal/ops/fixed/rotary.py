"""Rotation of queries and keys by their positions."""

from __future__ import annotations

from typing import Any

import torch

from shoal.ops.fixed.kernel import kernel
from shoal.ops.fixed.lanes import device
from shoal.ops.fixed.memory import load, store

_TASK_NUMBERS = 16384


def rotate(
    query: torch.Tensor, key: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate each pair (i, i + D/2) of every head by the angle of its position.

    ``query`` is ``[T, heads, D]``, ``key`` ``[T, key heads, D]``, of one dtype, bf16 or fp32;
    ``cosine`` and ``sine`` are ``[T, D/2]``, both bf16 or both fp32. The products and their sum are
    fp32, rounded once. New tensors are returned. Source: Su et al.,
    https://arxiv.org/abs/2104.09864, in the order of two halves that Hugging Face weights have.
    """
    cosine, sine = cosine.contiguous(), sine.contiguous()
    return _rotated(query, cosine, sine), _rotated(key, cosine, sine)


def _rotated(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    count, number, width = heads.shape
    if heads.stride(2) != 1:
        heads = heads.contiguous()
    out = torch.empty(heads.shape, dtype=heads.dtype)
    size = heads.element_size()
    per_task = max(1, _TASK_NUMBERS // max(1, number * width))
    _rotate(
        -(-count // per_task),
        *(heads.data_ptr(), heads.stride(0) * size, heads.stride(1) * size, size),
        *(count, number, width // 2, cosine.data_ptr(), sine.data_ptr(), cosine.element_size()),
        *(out.data_ptr(), per_task),
    )
    return out


@device
def rotate_head(
    source: Any, half: Any, size: Any, cosine: Any, sine: Any, angle_size: Any, out: Any
) -> None:
    """Rotate one head of ``2 * half`` numbers."""
    for start in range(0, half, 16):
        count = min(half - start, 16)
        place = start * size
        first = load(source + place, count, size)
        second = load(source + half * size + place, count, size)
        cos = load(cosine + start * angle_size, count, angle_size)
        sin = load(sine + start * angle_size, count, angle_size)
        store(out + place, first * cos - second * sin, count, size)
        store(out + half * size + place, second * cos + first * sin, count, size)


@kernel(12, "rotate")
def _rotate(task: Any, thread: Any, a: Any) -> None:
    source, stride, head_stride, size, count, number, half = (
        *(a[0], a[1], a[2], a[3], a[4], a[5], a[6]),
    )
    cosine, sine, angle_size, out, per_task = a[7], a[8], a[9], a[10], a[11]
    for row in range(task * per_task, min(count, (task + 1) * per_task)):
        angle = row * half * angle_size
        for head in range(number):
            rotate_head(
                source + row * stride + head * head_stride,
                half,
                size,
                cosine + angle,
                sine + angle,
                angle_size,
                out + (row * number + head) * 2 * half * size,
            )
