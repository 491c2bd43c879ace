"""AdamW whose weights and moments may each have a format of their own.

Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (arXiv:1711.05101). Where weights and
moments share one dtype and are rounded to nearest, ``torch.optim.AdamW`` is used instead; this one
exists for moments that are narrower than the weights, and for stochastic rounding.
"""

from __future__ import annotations

from typing import Any

import torch

from shoal.training.rounding import Rounding
from shoal.training.updates import Params, WideOptimizer, wide_gradients


class AdamW(WideOptimizer):
    """AdamW with moments in ``moment_dtype``; the arithmetic is fp32 whatever the dtypes.

    State per parameter besides ``step``: ``exp_avg`` and ``exp_avg_sq`` (the parameter's shape,
    ``moment_dtype``), the names of ``torch.optim.AdamW``. Moments are rounded to nearest when
    stored; the update itself uses them unrounded.
    """

    def __init__(
        self,
        params: Params,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        moment_dtype: torch.dtype,
        rounding: Rounding | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, rounding=rounding)
        self._moment_dtype = moment_dtype

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state; the base class would widen the moments to the weights' dtype."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = state[name].to(self._moment_dtype)

    def _prepare(self, parameter: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(parameter, dtype=self._moment_dtype)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=self._moment_dtype)
        return state

    def _update(
        self, parameters: list[torch.Tensor], steps: list[torch.Tensor], group: dict[str, Any]
    ) -> None:
        states = [self._prepare(parameter) for parameter in parameters]
        beta1, beta2 = group["betas"]
        lr = group["lr"]
        gradients = wide_gradients(parameters)

        first = torch._foreach_lerp(
            [state["exp_avg"].float() for state in states], gradients, 1 - beta1
        )
        second = torch._foreach_mul([state["exp_avg_sq"].float() for state in states], beta2)
        torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
        torch._foreach_copy_([state["exp_avg"] for state in states], first)
        torch._foreach_copy_([state["exp_avg_sq"] for state in states], second)

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
