"""Stochastic gradient descent with momentum and decoupled weight decay."""

from __future__ import annotations

from typing import Any

import torch

from shoal.training.rounding import Rounding
from shoal.training.updates import Params, WideOptimizer, keep, wide_gradients


class SGD(WideOptimizer):
    """Steps against the gradient, or against its running sum.

    State per parameter besides ``step``: with momentum ``momentum_buffer``, in the parameter's
    format, the name of ``torch.optim.SGD``.
    """

    def __init__(
        self,
        params: Params,
        *,
        lr: float,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        rounding: Rounding | None = None,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, defaults, rounding=rounding)

    def _update(
        self, parameters: list[torch.Tensor], steps: list[torch.Tensor], group: dict[str, Any]
    ) -> None:
        lr, momentum = group["lr"], group["momentum"]
        directions = wide_gradients(parameters)
        if momentum:
            sums = [self._sum_of(parameter) for parameter in parameters]
            before = torch._foreach_mul([value.float() for value in sums], momentum)
            directions = list(torch._foreach_add(before, directions))
            for kept, direction in zip(sums, directions, strict=True):
                keep(kept, direction, self._skip)
        weights = torch._foreach_mul(
            [parameter.float() for parameter in parameters], 1 - lr * group["weight_decay"]
        )
        torch._foreach_sub_(weights, torch._foreach_mul(directions, lr))
        self._store_weights(parameters, weights, steps)

    def _sum_of(self, parameter: torch.Tensor) -> torch.Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer: torch.Tensor = state["momentum_buffer"]
        return buffer
