"""The optimizer of a run, built over what this rank holds of each parameter."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch

from shoal.config import OptimizerSettings
from shoal.fsdp import ShardedParameter
from shoal.plan import Precision
from shoal.training.adamw import AdamW
from shoal.training.moments import Moments
from shoal.training.muon import HIDDEN, Muon
from shoal.training.rounding import Nearest, Rounding, Stochastic
from shoal.training.sgd import SGD


def build_optimizer(
    settings: OptimizerSettings,
    parameters: Sequence[ShardedParameter],
    precision: Precision,
    *,
    seed: int,
    matrix_rows: Mapping[str, int] = MappingProxyType({}),
) -> torch.optim.Optimizer:
    """An optimizer over ``local`` of each parameter, decay on matrices only.

    A matrix has two or more dimensions in the whole parameter, whatever part of it is held here.
    AdamW runs torch's fused kernel where weights and moments share a dtype and are rounded to
    nearest, else the room's own.

    Args:
        settings: Kind, rates and decay.
        parameters: What this rank holds.
        precision: Formats of weights and moments.
        seed: That of stochastic rounding.
        matrix_rows: Which parameters stack matrices of the layers, and of how many rows each is:
            those that Muon orthogonalizes.
    """
    groups = _groups(parameters, settings.weight_decay, matrix_rows)
    is_stochastic = precision.rounding == "stochastic"
    rounding: Rounding = Stochastic(parameters, seed) if is_stochastic else Nearest()
    if settings.kind == "sgd":
        momentum = settings.momentum_or_default
        return SGD(groups, lr=settings.lr, momentum=momentum, rounding=rounding)
    if settings.kind == "muon":
        return Muon(
            groups,
            lr=settings.lr,
            momentum=settings.momentum_or_default,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            moments=Moments(precision.moments),
            matrix_rows={p.local: matrix_rows[p.name] for p in parameters if p.name in matrix_rows},
            compute=precision.compute,
            rounding=rounding,
        )
    if precision.main_weights == precision.moments and not is_stochastic:
        return torch.optim.AdamW(
            groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True
        )
    return AdamW(
        groups,
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        moments=Moments(precision.moments),
        rounding=rounding,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every group the rate of the coming step; one that is a tensor is filled in place."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


@contextmanager
def skipping(optimizer: torch.optim.Optimizer, skip: torch.Tensor) -> Iterator[None]:
    """Have a step change neither weights nor state where ``skip``, a scalar on the device, is set.

    For the optimizers of ``build_optimizer``; it is how torch's fused kernels are told.
    """
    told: Any = optimizer
    told.found_inf = skip.float()
    try:
        yield
    finally:
        del told.found_inf


def _groups(
    parameters: Sequence[ShardedParameter], weight_decay: float, hidden: Collection[str]
) -> list[dict[str, Any]]:
    inside = [p.local for p in parameters if p.name in hidden]
    matrices = [p.local for p in parameters if len(p.shape) >= 2 and p.name not in hidden]
    vectors = [p.local for p in parameters if len(p.shape) < 2]
    groups: list[dict[str, Any]] = [
        {"params": inside, "weight_decay": weight_decay, HIDDEN: True},
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
