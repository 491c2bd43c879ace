"""Root-mean-square normalization."""

from __future__ import annotations

import math
from typing import Any

import torch

from shoal.ops.fixed.arithmetic import broadcast, fma, total
from shoal.ops.fixed.kernel import bits, kernel
from shoal.ops.fixed.lanes import device
from shoal.ops.fixed.memory import float_of, load, store

_TASK_NUMBERS = 16384
"""Numbers that are worth a task of their own."""


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, epsilon: float, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Scale the last dimension of ``x`` to unit mean square, then by ``weight``; shaped like ``x``.

    ``x`` is ``[..., N]``, ``weight`` ``[N]``, each bf16 or fp32; the result is in ``dtype``, else
    in that of ``x``. All is fp32 up to one rounding at the end. Source: Zhang and Sennrich,
    https://arxiv.org/abs/1910.07467.
    """
    rows = as_rows(x)
    out = torch.empty(x.shape, dtype=dtype or x.dtype)
    _run(rows, None, None, weight, epsilon, out)
    return out


def add_rms_norm(
    stream: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``stream + added`` like ``stream``, and ``rms_norm`` of that like ``added``; all ``[T, N]``.

    So a residual stream may be kept in fp32 while the layers compute in bf16.
    """
    sums, out = torch.empty_like(stream), torch.empty_like(added)
    _run(as_rows(stream), as_rows(added), sums, weight, epsilon, out)
    return sums, out


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """``x`` as ``[rows, N]`` whose rows are contiguous."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _run(
    rows: torch.Tensor,
    added: torch.Tensor | None,
    sums: torch.Tensor | None,
    weight: torch.Tensor,
    epsilon: float,
    out: torch.Tensor,
) -> None:
    count, width = rows.shape
    size = rows.element_size()
    per_task = max(1, _TASK_NUMBERS // width)
    other = (0, 0, 0)
    if added is not None:
        other = added.data_ptr(), added.stride(0) * added.element_size(), added.element_size()
    _rms_norm(
        -(-count // per_task),
        *(rows.data_ptr(), rows.stride(0) * size, count, width, size, *other),
        0 if sums is None else sums.data_ptr(),
        *(weight.data_ptr(), weight.element_size(), bits(epsilon)),
        *(out.data_ptr(), out.element_size(), per_task),
    )


@device
def normalize(
    source: Any,
    width: Any,
    size: Any,
    weight: Any,
    weight_size: Any,
    epsilon: Any,
    out: Any,
    out_size: Any,
) -> None:
    """Normalize one row of ``width`` numbers."""
    squares = broadcast(0.0)
    for start in range(0, width, 16):
        value = load(source + start * size, min(width - start, 16), size)
        squares = fma(value, value, squares)
    scale = broadcast(1.0 / math.sqrt(total(squares) / width + epsilon))
    for start in range(0, width, 16):
        count = min(width - start, 16)
        value = load(source + start * size, count, size) * scale
        value = value * load(weight + start * weight_size, count, weight_size)
        store(out + start * out_size, value, count, out_size)


@kernel(15, "rms_norm")
def _rms_norm(task: Any, thread: Any, a: Any) -> None:
    source, stride, count, width, size, other, other_stride, other_size, sums = (
        *(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8]),
    )
    weight, weight_size, epsilon, out, out_size, per_task = (
        *(a[9], a[10], float_of(a[11]), a[12], a[13], a[14]),
    )
    for row in range(task * per_task, min(count, (task + 1) * per_task)):
        line, target = source + row * stride, out + row * width * out_size
        if other:
            for start in range(0, width, 16):
                here = min(width - start, 16)
                value = load(line + start * size, here, size)
                place = other + row * other_stride + start * other_size
                value = value + load(place, here, other_size)
                store(sums + (row * width + start) * size, value, here, size)
            line = sums + row * width * size
        normalize(line, width, size, weight, weight_size, epsilon, target, out_size)
