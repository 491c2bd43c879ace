"""AdamW whose weights and moments may each have a format of their own.

Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (arXiv:1711.05101). Where weights and
moments share one dtype and are rounded to nearest, ``torch.optim.AdamW`` is used instead; this one
exists for moments in formats of their own, and for stochastic rounding.
"""

from __future__ import annotations

from typing import Any

import torch

from shoal.training.moments import Moments
from shoal.training.rounding import Rounding
from shoal.training.updates import Params, WideOptimizer, wide_gradients


class AdamW(WideOptimizer):
    """AdamW with moments in any format; the arithmetic is fp32.

    State per parameter besides ``step``: ``exp_avg`` and ``exp_avg_sq``, the names of
    ``torch.optim.AdamW``, as ``Moments`` keeps them. The update itself uses the new moments
    unrounded.
    """

    def __init__(
        self,
        params: Params,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        moments: Moments,
        rounding: Rounding | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, rounding=rounding)
        self._moments = moments

    def _averages(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        state = self.state[parameter]
        self._moments.create(state, name, parameter)
        return self._moments.read(state, name)

    def _update(
        self, parameters: list[torch.Tensor], steps: list[torch.Tensor], group: dict[str, Any]
    ) -> None:
        beta1, beta2 = group["betas"]
        lr = group["lr"]
        gradients = wide_gradients(parameters)

        first = torch._foreach_lerp(
            [self._averages(parameter, "exp_avg") for parameter in parameters],
            gradients,
            1 - beta1,
        )
        second = torch._foreach_mul(
            [self._averages(parameter, "exp_avg_sq") for parameter in parameters], beta2
        )
        torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
        for parameter, one, other in zip(parameters, first, second, strict=True):
            self._moments.write(self.state[parameter], "exp_avg", one, self._skip)
            self._moments.write(self.state[parameter], "exp_avg_sq", other, self._skip)

        # Each parameter's corrections of the moments' start from zero, scalars on its device.
        counts = torch.stack(steps).double()
        torch._foreach_sqrt_(second)
        torch._foreach_div_(second, list((1 - beta2**counts).sqrt().unbind()))
        torch._foreach_add_(second, group["eps"])
        torch._foreach_mul_(first, list((-lr / (1 - beta1**counts)).unbind()))
        weights = torch._foreach_mul(
            [parameter.float() for parameter in parameters], 1 - lr * group["weight_decay"]
        )
        torch._foreach_addcdiv_(weights, first, second)
        self._store_weights(parameters, weights, steps)
