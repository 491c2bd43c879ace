"""The norm of all gradients of a model whose parts live on several meshes.

norm² = Σ over ranks, parameters of ‖local gradient‖² / (ranks with the same rows)
"""

from __future__ import annotations

import torch
from torch import nn

from shoal.errors import ConfigError, WorkError
from shoal.fsdp.grid import Grid
from shoal.fsdp.group import ParameterGroup
from shoal.fsdp.inventory import groups_of


def gradient_norm(model: nn.Module) -> torch.Tensor:
    """The 2-norm of the whole model's final gradients, equal bit for bit on every rank (0-d, fp32).

    Every rank calls it. Parameters on a smaller mesh, such as experts, count over the larger one
    that contains it.

    Raises:
        ConfigError: where no unit's mesh contains the ranks of all the others.
        WorkError: while gradients wait for the last microbatch.
    """
    groups = [group for group in groups_of(model) if group.gradients is not None]
    if any(group.unfinished for group in groups):
        raise WorkError("Gradients have no norm yet: they wait for the step's last microbatch.")
    if not groups:
        return torch.zeros(())
    grid = _covering(groups)
    total = torch.zeros(1, dtype=torch.float64, device=grid.device)
    for group in groups:
        total += _sum_of_squares(group) / group.num_replicas
    for axis in reversed(grid.active):
        communicator = grid.communicators[axis]
        communicator.all_reduce(total, total, accumulate_dtype=torch.float64).wait()
    return total.sqrt().to(torch.float32)[0]


def clip_gradients(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Scale all gradients so that their norm is at most ``max_norm``; returns the norm before.

    As ``torch.nn.utils.clip_grad_norm_``: the factor is ``max_norm / (norm + 1e-6)``, at most 1,
    and a norm that is not finite makes gradients that are not. Every rank calls it.
    """
    if not max_norm > 0:
        raise ConfigError("clip", max_norm, "it must be above zero", "Leave it out to not clip")
    norm = gradient_norm(model)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for group in groups_of(model):
        gradients = _gradients(group)
        if gradients:
            torch._foreach_mul_(gradients, factor.to(gradients[0].device))
    return norm


def _covering(groups: list[ParameterGroup]) -> Grid:
    """The grid whose ranks include those of every group's."""
    grid = max((group.grid for group in groups), key=lambda grid: len(grid.members))
    for group in groups:
        if not group.grid.members <= grid.members:
            raise ConfigError(
                "mesh",
                sorted(group.grid.members),
                f"the largest mesh of the model, {sorted(grid.members)}, does not contain it",
                "Take the norm of the parts on their own",
            )
    return grid


def _sum_of_squares(group: ParameterGroup) -> torch.Tensor:
    gradients = _gradients(group)
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=group.grid.device)
    norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)
    return torch.stack(norms).double().square().sum()


def _gradients(group: ParameterGroup) -> list[torch.Tensor]:
    """Gradients of the rows held here."""
    locals_ = (entry.local for entry in group.entries)
    return [p.grad for p in locals_ if p.grad is not None and p.grad.numel()]
