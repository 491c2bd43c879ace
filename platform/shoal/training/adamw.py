"""AdamW whose moments may be narrower than the weights they update.

Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (arXiv:1711.05101). Where weights and
moments share one dtype, ``torch.optim.AdamW`` is used instead; this one exists for bf16 moments
under fp32 weights, which halves the optimizer's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, overload

import torch

BUCKET_ELEMENTS = 2**22
"""Elements updated at a time: bounds the fp32 temporaries to a few times 16 MiB."""


class AdamW(torch.optim.Optimizer):
    """AdamW with moments in ``moment_dtype``; the arithmetic is fp32 whatever the dtypes.

    State per parameter: ``step`` (fp32 scalar), ``exp_avg`` and ``exp_avg_sq`` (the parameter's
    shape, ``moment_dtype``), the names of ``torch.optim.AdamW``. Moments are rounded to nearest
    when stored; the update itself uses them unrounded.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        moment_dtype: torch.dtype,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )
        self._moment_dtype = moment_dtype

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state; the base class would widen the moments to the weights' dtype."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = state[name].to(self._moment_dtype)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for bucket in _buckets(group["params"]):
                for parameter in bucket:
                    self._prepare(parameter)
                self._update(bucket, group)
        return loss

    def _prepare(self, parameter: torch.Tensor) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(parameter, dtype=self._moment_dtype)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=self._moment_dtype)

    def _update(self, parameters: list[torch.Tensor], group: dict[str, Any]) -> None:
        states = [self.state[parameter] for parameter in parameters]
        for state in states:
            state["step"] += 1
        steps = [int(state["step"].item()) for state in states]
        beta1, beta2 = group["betas"]
        lr = group["lr"]
        gradients = [_gradient(parameter).float() for parameter in parameters]

        first = [state["exp_avg"].float() for state in states]
        torch._foreach_lerp_(first, gradients, 1 - beta1)
        second = [state["exp_avg_sq"].float() for state in states]
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, gradients, gradients, 1 - beta2)
        _store([state["exp_avg"] for state in states], first)
        _store([state["exp_avg_sq"] for state in states], second)

        scale = torch._foreach_sqrt(second)
        torch._foreach_div_(scale, [(1 - beta2**step) ** 0.5 for step in steps])
        torch._foreach_add_(scale, group["eps"])
        weights = [parameter.float() for parameter in parameters]
        torch._foreach_mul_(weights, 1 - lr * group["weight_decay"])
        torch._foreach_addcdiv_(weights, first, scale, [-lr / (1 - beta1**step) for step in steps])
        _store(parameters, weights)


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _store(targets: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Copy back what ``float()`` copied; an fp32 tensor was updated in place already."""
    pairs = [
        (target, value)
        for target, value in zip(targets, values, strict=True)
        if target is not value
    ]
    if pairs:
        torch._foreach_copy_([target for target, _ in pairs], [value for _, value in pairs])


def _buckets(parameters: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Parameters with gradients, in runs of about ``BUCKET_ELEMENTS``."""
    bucket: list[torch.Tensor] = []
    num_elements = 0
    for parameter in parameters:
        if parameter.grad is None:
            continue
        bucket.append(parameter)
        num_elements += parameter.numel()
        if num_elements >= BUCKET_ELEMENTS:
            yield bucket
            bucket, num_elements = [], 0
    if bucket:
        yield bucket
