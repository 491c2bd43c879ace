"""The norm of all gradients of a model whose parts live on several meshes.

norm² = Σ over ranks, parameters of ‖local gradient‖² / (ranks with the same rows)

Copies of parameters for which other ranks stand are left out of the sum, and clipped all the same.
"""

from __future__ import annotations

import torch
from torch import nn

from shoal.errors import ConfigError, WorkError
from shoal.fsdp.communicator import Communicator
from shoal.fsdp.grid import Grid
from shoal.fsdp.group import ParameterGroup
from shoal.fsdp.inventory import groups_of
from shoal.fsdp.reduction import Reduction


def gradient_norm(model: nn.Module, *, beyond: Communicator | None = None) -> torch.Tensor:
    """The 2-norm of the whole model's final gradients, equal bit for bit on every rank (0-d, fp32).

    Every rank calls it. Parameters on a smaller mesh, such as experts, count over the larger one
    that contains it. ``beyond`` joins the ranks whose meshes hold other parts of the model.

    Raises:
        ConfigError: where no unit's mesh contains the ranks of all the others.
        WorkError: while gradients wait for the last microbatch.
    """
    every = list(groups_of(model))
    groups = [group for group in every if group.gradients is not None]
    if any(group.unfinished for group in groups):
        raise WorkError("Gradients have no norm yet: they wait for the step's last microbatch.")
    if not groups and beyond is None:
        return torch.zeros(())
    total = torch.zeros(1, dtype=torch.float64, device=every[0].grid.device)
    for group in groups:
        if not group.is_copy:
            total += _sum_of_squares(group) / group.num_replicas
    for communicator in (*_communicators(groups), beyond):
        if communicator is not None:
            communicator.all_reduce(total, total, Reduction(accumulate_dtype=torch.float64)).wait()
    return total.sqrt().to(torch.float32)[0]


def clip_gradients(
    model: nn.Module, max_norm: float, *, beyond: Communicator | None = None
) -> torch.Tensor:
    """Scale all gradients so that their norm is at most ``max_norm``; returns the norm before.

    As ``torch.nn.utils.clip_grad_norm_``: the factor is ``max_norm / (norm + 1e-6)``, at most 1,
    and a norm that is not finite makes gradients that are not. Every rank calls it; for ``beyond``
    see ``gradient_norm``.
    """
    if not max_norm > 0:
        raise ConfigError("clip", max_norm, "it must be above zero", "Leave it out to not clip")
    norm = gradient_norm(model, beyond=beyond)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for group in groups_of(model):
        gradients = _gradients(group)
        if gradients:
            torch._foreach_mul_(gradients, factor.to(gradients[0].device))
    return norm


def _communicators(groups: list[ParameterGroup]) -> list[Communicator]:
    """Those of the ranks that hold any of the groups, innermost first."""
    if not groups:
        return []
    grid = _covering(groups)
    return [grid.communicators[axis] for axis in reversed(grid.active)]


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
