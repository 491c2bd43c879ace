"""Small steps between the large kernels, each number or row by itself.

torch has all of these, but computes the last numbers of a tensor by other functions than the rest,
and what it computes cannot be recorded (see ``shoal.ops.fixed.program``).
"""

from __future__ import annotations

from typing import Any

import torch

from shoal.ops.fixed.arithmetic import broadcast, exponential, larger
from shoal.ops.fixed.kernel import bits, kernel
from shoal.ops.fixed.memory import float_of, load, read_float, read_int, read_int32, store
from shoal.ops.fixed.norm import as_rows

_TASK_NUMBERS = 8192


def take_rows(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows ``index`` ``[T]`` of ``table`` ``[V, N]``, bf16 or fp32, as fp32 ``[T, N]``.

    ``index`` is int32 or int64.
    """
    (count,), width = index.shape, table.shape[1]
    table, index = table.contiguous(), index.contiguous()
    out = torch.empty(count, width, dtype=torch.float32)
    per_task = max(1, _TASK_NUMBERS // width)
    _take_rows(
        -(-count // per_task),
        *(table.data_ptr(), table.element_size(), width, index.data_ptr()),
        *(index.element_size(), count, out.data_ptr(), per_task),
    )
    return out


def widened(x: torch.Tensor) -> torch.Tensor:
    """``x`` ``[T, N]`` in fp32."""
    if x.dtype == torch.float32:
        return x
    rows = as_rows(x)
    out = torch.empty(rows.shape, dtype=torch.float32)
    _clamp(*_by_rows(rows), bits(float("inf")), out.data_ptr(), 4)
    return out


def clamped(x: torch.Tensor, bound: float) -> torch.Tensor:
    """``x`` ``[T, N]`` with every number brought into ``[-bound, bound]``; what is none stays."""
    rows = as_rows(x)
    out = torch.empty(rows.shape, dtype=x.dtype)
    _clamp(*_by_rows(rows), bits(bound), out.data_ptr(), out.element_size())
    return out


def add_gated(output: torch.Tensor, shared: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """``output + sigmoid(scores) * shared`` in fp32, rounded once to the dtype of ``output``.

    ``output`` and ``shared`` are ``[T, H]`` of one dtype, ``scores`` is ``[T, 1]`` fp32.
    """
    rows, others = as_rows(output), as_rows(shared)
    scores = scores.contiguous()
    out = torch.empty(rows.shape, dtype=rows.dtype)
    _add_gated(
        *_by_rows(rows),
        *(others.data_ptr(), others.stride(0) * others.element_size()),
        *(scores.data_ptr(), out.data_ptr()),
    )
    return out


def _by_rows(rows: torch.Tensor) -> tuple[int, ...]:
    """Number of tasks, and what a kernel needs to find its rows."""
    (count, width), size = rows.shape, rows.element_size()
    per_task = max(1, _TASK_NUMBERS // width)
    return (
        -(-count // per_task),
        rows.data_ptr(),
        rows.stride(0) * size,
        count,
        width,
        size,
        per_task,
    )


@kernel(8, "take_rows")
def _take_rows(task: Any, thread: Any, a: Any) -> None:
    table, size, width, index, index_size, count, out, per_task = (
        *(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7]),
    )
    for row in range(task * per_task, min(count, (task + 1) * per_task)):
        place = index + row * index_size
        number = read_int(place) if index_size == 8 else read_int32(place)
        line = table + number * width * size
        for start in range(0, width, 16):
            here = min(width - start, 16)
            store(out + (row * width + start) * 4, load(line + start * size, here, size), here, 4)


@kernel(9, "clamp")
def _clamp(task: Any, thread: Any, a: Any) -> None:
    rows, stride, count, width, size, per_task = a[0], a[1], a[2], a[3], a[4], a[5]
    bound, out, out_size = float_of(a[6]), a[7], a[8]
    low, minus = broadcast(-bound), broadcast(-1.0)
    for row in range(task * per_task, min(count, (task + 1) * per_task)):
        for start in range(0, width, 16):
            here = min(width - start, 16)
            value = larger(load(rows + row * stride + start * size, here, size), low)
            value = minus * larger(minus * value, low)
            store(out + (row * width + start) * out_size, value, here, out_size)


@kernel(10, "add_gated")
def _add_gated(task: Any, thread: Any, a: Any) -> None:
    rows, stride, count, width, size, per_task = a[0], a[1], a[2], a[3], a[4], a[5]
    others, other_stride, scores, out = a[6], a[7], a[8], a[9]
    one = broadcast(1.0)
    for row in range(task * per_task, min(count, (task + 1) * per_task)):
        score = broadcast(read_float(scores + row * 4))
        share = one / (one + exponential(broadcast(0.0) - score))
        for start in range(0, width, 16):
            here = min(width - start, 16)
            value = load(rows + row * stride + start * size, here, size)
            added = share * load(others + row * other_stride + start * size, here, size)
            store(out + (row * width + start) * size, value + added, here, size)
