"""The logistic function."""

from __future__ import annotations

from typing import Any

import torch

from shoal.ops.fixed.kernel import kernel
from shoal.ops.fixed.lanes import broadcast, exponential, load, store

_TASK_NUMBERS = 8192


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """``1 / (1 + exp(-x))`` of each number of ``x``, fp32; like ``x``, contiguous.

    (torch computes the last few numbers of a tensor by another function than the others.)
    """
    x = x.contiguous()
    out = torch.empty(x.shape, dtype=torch.float32)
    _sigmoid(-(-x.numel() // _TASK_NUMBERS), x.data_ptr(), x.numel(), out.data_ptr())
    return out


@kernel(3, "sigmoid")
def _sigmoid(task: Any, thread: Any, a: Any) -> None:
    source, count, out = a[0], a[1], a[2]
    one = broadcast(1.0)
    for start in range(task * 8192, min(count, (task + 1) * 8192), 16):
        here = min(count - start, 16)
        value = load(source + start * 4, here, 4)
        store(out + start * 4, one / (one + exponential(broadcast(0.0) - value)), here, 4)
