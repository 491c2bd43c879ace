"""What a torch optimizer needs to step over sharded parameters.

before the step   refuse closures and unfinished gradients
                  cast gradients of another dtype for the moment
                  take parameters without a row here away from fused kernels
after the step    give those their (empty) state through the optimizer's plain path
                  put gradients and parameters back
                  tell each group once that its main weights changed
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.errors import ConfigError, WorkError
from shoal.fsdp.group import ParameterGroup, group_of


def fully_shard_optimizer(optimizer: Optimizer, *, precision_aware: bool = False) -> None:
    """Adapt an optimizer, in place, to the sharded parameters among those it updates.

    After the first step its ``state`` has an entry for every parameter, of no rows where this rank
    holds none.

    Args:
        optimizer: Built over the parameters of a sharded model.
        precision_aware: Whether it takes gradients of another dtype than the weights'; otherwise
            such gradients are cast for each step.

    Raises:
        ConfigError: for an optimizer that was built before the model was sharded.
    """
    for parameter in _parameters(optimizer):
        group = group_of(parameter)
        if group is not None and all(entry.local is not parameter for entry in group.entries):
            raise ConfigError(
                "optimizer",
                type(optimizer).__name__,
                "it holds parameters from before the model was sharded",
                "Build it from model.parameters() after fully_shard_context",
            )
    step = _Step(precision_aware)
    optimizer.register_step_pre_hook(step.before)
    optimizer.register_step_post_hook(step.after)


class _Step:
    """The two hooks around a step and what they carry from one to the other."""

    def __init__(self, precision_aware: bool) -> None:
        self._precision_aware = precision_aware
        self._gradients: list[tuple[nn.Parameter, Tensor]] = []
        self._parameters: list[tuple[dict[str, Any], list[nn.Parameter]]] = []
        self._inside = False

    def before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Make gradients and parameters fit for the optimizer's kernels."""
        if self._inside:
            return
        self._restore()  # after a step that raised
        if any(value is not None for value in (*args[1:], *kwargs.values())):
            raise ConfigError(
                "closure",
                "given",
                "a closure would run the model in the middle of a step",
                "Run forward and backward before optimizer.step()",
            )
        for group in _groups(optimizer):
            if group.unfinished or group.in_use:
                raise WorkError(
                    "Gradients wait for the step's last microbatch, or for the end of backward: "
                    "run the last one in microbatch(context, is_last=True) before the step."
                )
        if not self._precision_aware:
            self._cast_gradients(optimizer)
        for options in optimizer.param_groups:
            if options.get("fused"):
                parameters = options["params"]
                self._parameters.append((options, parameters))
                options["params"] = [p for p in parameters if p.numel()]

    def after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Put things back, and let compute have the new weights."""
        if self._inside:
            return
        rowless = [[p for p in held if not p.numel()] for _, held in self._parameters]
        stepped = [p for held in rowless for p in held if p.grad is not None]
        if any(p not in optimizer.state for p in stepped):
            self._step_rowless(optimizer, rowless)
        else:
            self._count_rowless(optimizer, stepped)
        self._restore()
        for group in _groups(optimizer):
            group.sync()

    def _cast_gradients(self, optimizer: Optimizer) -> None:
        for parameter in _parameters(optimizer):
            gradient = parameter.grad
            if gradient is not None and gradient.dtype != parameter.dtype:
                self._gradients.append((parameter, gradient))
                parameter.grad = gradient.to(parameter.dtype)

    def _step_rowless(self, optimizer: Optimizer, rowless: list[list[nn.Parameter]]) -> None:
        """Step the parameters that fused kernels were spared: their counters, as it were."""
        everything = [dict(options) for options in optimizer.param_groups]
        for options in optimizer.param_groups:
            options["params"] = []
        for (options, _), parameters in zip(self._parameters, rowless, strict=True):
            options.update(params=parameters, fused=False, foreach=False)
        self._inside = True
        found_inf = optimizer.__dict__.pop("found_inf", None)  # only fused kernels take it
        try:
            optimizer.step()
        finally:
            self._inside = False
            if found_inf is not None:
                optimizer.__dict__["found_inf"] = found_inf
            for options, before in zip(optimizer.param_groups, everything, strict=True):
                options.update(before)

    def _count_rowless(self, optimizer: Optimizer, stepped: list[nn.Parameter]) -> None:
        """Count one more step of parameters without rows, of which nothing else changes.

        Unlike the plain path it reads no number on the host.
        """
        for parameter in stepped:
            step = optimizer.state[parameter].get("step")
            if step is not None:
                step += 1

    def _restore(self) -> None:
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        for options, parameters in self._parameters:
            options["params"] = parameters
        self._gradients.clear()
        self._parameters.clear()


def _parameters(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    for options in optimizer.param_groups:
        yield from options["params"]


def _groups(optimizer: Optimizer) -> list[ParameterGroup]:
    """The parameter groups that the optimizer updates, each once."""
    groups = {id(g): g for p in _parameters(optimizer) if (g := group_of(p)) is not None}
    return list(groups.values())
