"""Cross-entropy of a linear head, in chunks of rows.

The logits of all tokens, ``[T, V]`` in fp32, would be the largest tensor of a training step by
far. Here a chunk of rows is taken through the head, the loss and the loss's gradient before the
next, so that only the gradients of the head's input and weight outlive it. This needs the forward
pass to compute gradients, which it does only where autograd will ask for them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from shoal.ops.replaceable import replaceable

IGNORED = -100
"""Label of a row that has no target."""

CHUNK_BYTES = 64 * 2**20
"""Most fp32 logits that exist at a time, unless a single row takes more."""


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        chunk_rows: int,
    ) -> torch.Tensor:
        hidden_gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        weight_gradient = None
        if ctx.needs_input_grad[1]:
            # fp32: many chunks are added up.
            weight_gradient = torch.zeros_like(weight, dtype=torch.float32)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for start in range(0, hidden.shape[0], chunk_rows):
            rows = slice(start, start + chunk_rows)
            logits = (hidden[rows] @ weight.t()).float()
            targets = labels[rows]
            kept = targets != IGNORED
            index = targets.where(kept, 0).unsqueeze(1)
            normalizer = logits.logsumexp(dim=1, keepdim=True)
            total += ((normalizer - logits.gather(1, index)).squeeze(1) * kept).sum()
            if hidden_gradient is None and weight_gradient is None:
                continue
            logits.sub_(normalizer).exp_()
            logits.scatter_add_(1, index, logits.new_full(index.shape, -1.0))
            logit_gradient = logits.mul_(kept.unsqueeze(1)).to(hidden.dtype)
            if hidden_gradient is not None:
                torch.mm(logit_gradient, weight, out=hidden_gradient[rows])
            if weight_gradient is not None:
                _add_product(weight_gradient, logit_gradient.t(), hidden[rows])
        ctx.gradients = (hidden_gradient, weight_gradient)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, gradient: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        if ctx.gradients is None:
            raise RuntimeError("linear_cross_entropy keeps its gradients for one backward only")
        hidden_gradient, weight_gradient = ctx.gradients
        ctx.gradients = None  # scaled in place, so good for once
        if hidden_gradient is not None:
            hidden_gradient = hidden_gradient.mul_(gradient)
        if weight_gradient is not None:
            weight_gradient = weight_gradient.mul_(gradient).to(ctx.weight_dtype)
        return hidden_gradient, weight_gradient, None, None


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """``total += left @ right``, without a second matrix of its size where the dtypes agree."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


@replaceable
def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    chunk_rows: int | None = None,
) -> torch.Tensor:
    """Sum over rows of ``-log softmax(hidden @ weight.T)[label]``, a fp32 scalar.

    ``hidden`` is ``[T, H]``, ``weight`` ``[V, H]`` of the same dtype, ``labels`` ``[T]`` int64;
    rows labelled ``IGNORED`` count nothing. ``chunk_rows`` rows are taken at a time; unset, so
    many that their fp32 logits take 64 MiB. Logits are rounded to the head's dtype once,
    everything after is fp32. The result can be differentiated once.
    """
    if chunk_rows is None:
        chunk_rows = max(CHUNK_BYTES // (4 * weight.shape[0]), 1)
    if not torch.is_grad_enabled():
        hidden, weight = hidden.detach(), weight.detach()
    loss: torch.Tensor = _LinearCrossEntropy.apply(hidden, weight, labels, chunk_rows)  # type: ignore[no-untyped-call]
    return loss
