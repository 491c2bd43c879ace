"""Moving tokens to their experts and back.

A token that visits k experts has k rows. ``dispatch`` lays the rows of all tokens out expert by
expert, tokens in order within each; ``combine`` brings them back and adds a token's k rows, each
times its weight, in the order of the expert's number. Both directions are gathers, forward and
backward, so no order of addition is left to chance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertGroups:
    """Which rows belong to which expert. T tokens, k experts each, E experts."""

    order: torch.Tensor
    """``[T * k]``: row of the expert-major layout to (token, choice) of the token-major one."""
    inverse: torch.Tensor
    """``[T * k]``: the other way."""
    sizes: tuple[int, ...]
    """Rows of each expert, E numbers."""
    choices: int
    """Experts of a token, k."""

    @staticmethod
    def of(choices: torch.Tensor, num_experts: int) -> ExpertGroups:
        """Groups for ``choices`` ``[T, k]``, the experts of each token in increasing order."""
        flat = choices.flatten()
        order = torch.argsort(flat, stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel(), device=order.device)
        sizes = torch.bincount(flat, minlength=num_experts).tolist()
        return ExpertGroups(
            order=order, inverse=inverse, sizes=tuple(sizes), choices=choices.shape[1]
        )


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, choices: int
    ) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        ctx.choices = choices
        return tokens.index_select(0, order // choices)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        rows = gradient.index_select(0, inverse)
        rows = rows.view(rows.shape[0] // ctx.choices, ctx.choices, rows.shape[1])
        return rows.sum(dim=1), None, None, None


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return gradient.index_select(0, inverse), None, None


def dispatch(tokens: torch.Tensor, groups: ExpertGroups) -> torch.Tensor:
    """Rows of ``tokens`` ``[T, H]`` in expert-major order: ``[T * k, H]``."""
    rows: torch.Tensor = _Dispatch.apply(tokens, groups.order, groups.inverse, groups.choices)  # type: ignore[no-untyped-call]
    return rows


def permute(rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """``rows`` ``[R, H]`` in another order: ``order`` and its ``inverse`` are ``[R]`` each."""
    permuted: torch.Tensor = _Permute.apply(rows, order, inverse)  # type: ignore[no-untyped-call]
    return permuted


def combine(rows: torch.Tensor, weights: torch.Tensor, groups: ExpertGroups) -> torch.Tensor:
    """Each token's expert-major ``rows`` ``[T * k, H]`` times ``weights`` ``[T, k]``, added.

    The result is ``[T, H]`` in the dtype of ``rows``; products and sums are taken in the wider of
    the two dtypes, experts in increasing order.
    """
    back = permute(rows, groups.inverse, groups.order)
    weighted = back.view(*weights.shape, rows.shape[1]) * weights.unsqueeze(-1)
    return weighted.sum(dim=1).to(rows.dtype)
