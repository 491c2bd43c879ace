"""The gated activation of the MLP."""

from __future__ import annotations

from typing import Any

import torch

from shoal.ops.fixed.arithmetic import broadcast, exponential
from shoal.ops.fixed.kernel import kernel
from shoal.ops.fixed.lanes import device
from shoal.ops.fixed.memory import load, store
from shoal.ops.fixed.norm import as_rows

_TASK_NUMBERS = 8192


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``, elementwise and contiguous, in fp32 with one rounding.

    Both are ``[..., N]``, bf16 or fp32; halves of one tensor are not copied. Source: Shazeer,
    https://arxiv.org/abs/2002.05202.
    """
    gates, ups = as_rows(gate), as_rows(up)
    out = torch.empty(gate.shape, dtype=gate.dtype)
    (count, width), size = gates.shape, gates.element_size()
    per_task = max(1, _TASK_NUMBERS // width)
    _swiglu(
        -(-count // per_task),
        *(gates.data_ptr(), gates.stride(0) * size, ups.data_ptr(), ups.stride(0) * size),
        *(count, width, size, out.data_ptr(), per_task),
    )
    return out


@device
def gated(gate: Any, up: Any) -> Any:
    """``silu(gate) * up`` of 16 numbers."""
    one = broadcast(1.0)
    return gate / (one + exponential(broadcast(0.0) - gate)) * up


@kernel(9, "swiglu")
def _swiglu(task: Any, thread: Any, a: Any) -> None:
    gates, gate_stride, ups, up_stride, count, width, size, out, per_task = (
        *(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8]),
    )
    for row in range(task * per_task, min(count, (task + 1) * per_task)):
        for start in range(0, width, 16):
            here = min(width - start, 16)
            gate = load(gates + row * gate_stride + start * size, here, size)
            up = load(ups + row * up_stride + start * size, here, size)
            store(out + (row * width + start) * size, gated(gate, up), here, size)
