"""What this room's optimizers have in common: fp32 arithmetic whatever the formats of the state.

Kernels of torch update weights in the weights' own format. These compute each update in fp32 from
whatever the weights, gradients and moments are kept in, and round once, when they store.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, overload

import torch

from shoal.plan import BUCKET_ELEMENTS
from shoal.training.rounding import Nearest, Rounding

Params = Iterable[torch.Tensor] | Iterable[dict[str, Any]]


class WideOptimizer(torch.optim.Optimizer, ABC):
    """Computes in fp32; a subclass says what an update is.

    State of every parameter: ``step``, how many updates it had, an fp32 scalar on its device. A
    step reads no number on the host. Where the attribute ``found_inf`` is set, a scalar, and is not
    0, a step changes nothing. Learning rates may be scalar tensors.
    """

    def __init__(
        self, params: Params, defaults: dict[str, Any], *, rounding: Rounding | None = None
    ) -> None:
        """``rounding`` says how main weights are rounded; unset, to nearest."""
        super().__init__(params, defaults)
        self._rounding = rounding or Nearest()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state; the base class alone would bring it to the weights' formats."""
        super().load_state_dict(state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                self.state[parameter][name] = value.to(parameter.device, copy=True)

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
            self._step_group(group)
        return loss

    def _step_group(self, group: dict[str, Any]) -> None:
        for bucket in _buckets(group["params"]):
            self._update(bucket, self._count(bucket), group)

    @abstractmethod
    def _update(
        self, parameters: list[torch.Tensor], steps: list[torch.Tensor], group: dict[str, Any]
    ) -> None:
        """Make the updates number ``steps`` of parameters that have gradients."""

    def _count(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        steps = []
        for parameter in parameters:
            state = self.state[parameter]
            if "step" not in state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            skip = self._skip
            state["step"] += 1 if skip is None else ~skip
            steps.append(state["step"])
        return steps

    def _store_weights(
        self,
        parameters: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        steps: Sequence[torch.Tensor],
    ) -> None:
        """Let the parameters have ``values`` (fp32) after the updates number ``steps``."""
        for parameter, value, step in zip(parameters, values, steps, strict=True):
            keep(parameter, self._rounding.rounded(parameter, value, step), self._skip)

    @property
    def _skip(self) -> torch.Tensor | None:
        """Whether this step changes nothing: ``found_inf``, which torch's fused kernels follow."""
        found: torch.Tensor | None = getattr(self, "found_inf", None)
        return None if found is None else found.bool()


def keep(kept: torch.Tensor, value: torch.Tensor, skip: torch.Tensor | None) -> None:
    """Let a tensor have a new value, unless ``skip`` is set."""
    if skip is not None:
        value = torch.where(skip, kept, value.to(kept.dtype))
    kept.copy_(value)


def wide_gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The parameters' gradients in fp32."""
    gradients = []
    for parameter in parameters:
        assert parameter.grad is not None
        gradients.append(parameter.grad.float())
    return gradients


def _buckets(parameters: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
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
