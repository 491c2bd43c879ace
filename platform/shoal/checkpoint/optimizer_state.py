"""Making an optimizer create its state, so that a checkpoint can be read into it.

Torch's optimizers create their state with the first step. Only the optimizer knows which states,
dtypes and devices it wants, so it is asked by a step with zero gradients and a zero rate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from shoal.fsdp import ShardedParameter


def initialize_state(
    optimizer: torch.optim.Optimizer, parameters: Sequence[ShardedParameter]
) -> None:
    """Give every trainable parameter of which rows are held here the state its optimizer wants.

    Weights stay as they are, and so does state that exists; gradients are dropped. Every rank calls
    it, as the optimizer's hooks may communicate.
    """
    optimizer.zero_grad(set_to_none=True)
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    for parameter in parameters:
        local = parameter.local
        if (
            local in held
            and local.requires_grad
            and local.numel()
            and not optimizer.state.get(local)
        ):
            local.grad = torch.zeros_like(local, dtype=local.grad_dtype or local.dtype)
    with _zero_rates(optimizer):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)


@contextmanager
def _zero_rates(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if torch.is_tensor(group["lr"]) else 0.0
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
