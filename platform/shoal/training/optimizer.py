"""The optimizer of a run, built over what this rank holds of each parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shoal.config import OptimizerSettings
from shoal.errors import ConfigError
from shoal.fsdp import ShardedParameter
from shoal.plan import Precision
from shoal.training.adamw import AdamW
from shoal.training.moments import Moments
from shoal.training.rounding import Nearest, Rounding, Stochastic
from shoal.training.sgd import SGD


def build_optimizer(
    settings: OptimizerSettings,
    parameters: Sequence[ShardedParameter],
    precision: Precision,
    *,
    seed: int,
) -> torch.optim.Optimizer:
    """An optimizer over ``local`` of each parameter, decay on matrices only.

    A matrix has two or more dimensions in the whole parameter, whatever part of it is held here.
    AdamW runs torch's fused kernel where weights and moments share a dtype and are rounded to
    nearest, else the room's own. ``seed`` is that of stochastic rounding.

    Raises ConfigError for a kind that cannot be trained with yet.
    """
    if settings.kind == "muon":
        raise ConfigError("optimizer.kind", "muon", "it is not implemented", "Use adamw or sgd")
    groups = _groups(parameters, settings.weight_decay)
    is_stochastic = precision.rounding == "stochastic"
    rounding: Rounding = Stochastic(parameters, seed) if is_stochastic else Nearest()
    if settings.kind == "sgd":
        return SGD(groups, lr=settings.lr, momentum=settings.momentum, rounding=rounding)
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
    """Give every group the rate of the coming step."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def _groups(parameters: Sequence[ShardedParameter], weight_decay: float) -> list[dict[str, Any]]:
    matrices = [parameter.local for parameter in parameters if len(parameter.shape) >= 2]
    vectors = [parameter.local for parameter in parameters if len(parameter.shape) < 2]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
