"""Experts on a smaller mesh than dense layers: scale of gradients, norm, clipping (A4, A11)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shoal.config import Level
from shoal.errors import ConfigError, WorkError
from shoal.fsdp import (
    clip_gradients,
    fully_shard,
    fully_shard_context,
    fully_shard_optimizer,
    gradient_norm,
    microbatch,
    placements_for,
    sharded_parameters,
)
from tests.fsdp.toys import (
    LADDER,
    O,
    P,
    R,
    batch,
    build,
    loss_of,
    mesh_of,
    placements_on,
    shard,
)
from tests.ranks import RankPool

EXPERTS, HIDDEN, TOKENS = 4, 6, 5


class _Gather(torch.autograd.Function):
    """Tokens of all ranks of a group, in rank order; gradients go back summed."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.group = group
        parts = [torch.empty_like(value) for _ in range(group.size())]
        dist.all_gather(parts, value.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradient.clone()
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(ctx.group.size())[ctx.group.rank()], None


class _Scatter(torch.autograd.Function):
    """The sum over a group of outputs for all its tokens, of which each rank keeps its own."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.group = group
        total = value.clone()
        dist.all_reduce(total, group=group)
        return total.chunk(group.size())[group.rank()].contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        parts = [torch.empty_like(gradient) for _ in range(ctx.group.size())]
        dist.all_gather(parts, gradient.contiguous(), group=ctx.group)
        return torch.cat(parts), None


class Experts(nn.Module):
    """Experts ``first`` to ``first + count``, each one matrix; others contribute nothing."""

    def __init__(self, weight: torch.Tensor, first: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())
        self._first = first

    def forward(self, tokens: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
        """Tokens ``[T, H]`` through the experts that ``choice [T]`` names."""
        out = torch.zeros_like(tokens)
        for index, matrix in enumerate(self.weight.view(-1, HIDDEN, HIDDEN)):
            mine = (choice == self._first + index).unsqueeze(-1)
            out = out + torch.where(mine, tokens @ matrix.T, 0.0)
        return out


class Mixture(nn.Module):
    """One top-1 layer between dense ones; ``group`` shares the experts, or all are here."""

    def __init__(self, group: ProcessGroup | None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.into = nn.Linear(HIDDEN, HIDDEN)
        self.router = nn.Linear(HIDDEN, EXPERTS)
        weight = torch.randn(EXPERTS * HIDDEN, HIDDEN) / HIDDEN**0.5
        size, rank = (group.size(), group.rank()) if group else (1, 0)
        self.experts = Experts(weight.chunk(size)[rank], rank * EXPERTS // size)
        self._group = group

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Same shape as ``tokens [T, H]``."""
        hidden = torch.tanh(self.into(tokens))
        probability, choice = self.router(hidden).softmax(-1).max(-1)
        if self._group is None:
            mixed = self.experts(hidden, choice)
        else:
            everyone = _Gather.apply(hidden, self._group)  # type: ignore[no-untyped-call]
            choices = _Gather.apply(choice, self._group)  # type: ignore[no-untyped-call]
            partial = self.experts(everyone, choices)
            mixed = _Scatter.apply(partial, self._group)  # type: ignore[no-untyped-call]
        out: torch.Tensor = hidden + probability.unsqueeze(-1) * mixed
        return out


def _loss(model: nn.Module, step: int, index: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step * 100 + index * 10 + rank)
    tokens = torch.randn(TOKENS, HIDDEN, generator=generator)
    loss: torch.Tensor = (model(tokens) - tokens.roll(1, 0)).square().mean()
    return loss


def _meshes(expert: int, inner: int) -> tuple[DeviceMesh, DeviceMesh, ProcessGroup]:
    world_size = dist.get_world_size()
    dense = mesh_of((world_size // inner, inner))
    shape = (world_size // (expert * max(inner // expert, 1)), max(inner // expert, 1), expert)
    whole = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner", "expert"))
    return dense, whole["outer", "inner"], whole.get_group("expert")


def _trains_like_one_process(
    expert: int, inner: int, levels: list[tuple[Level, Level]], microbatches: int
) -> None:
    world_size, rank = dist.get_world_size(), dist.get_rank()
    dense, sparse, group = _meshes(expert, inner)
    for outer, inside in levels:
        model, reference = Mixture(group), Mixture(None)
        with fully_shard_context("cpu") as context:
            fully_shard(model.experts, sparse, placements_for(outer, inside), grad_divisor=expert)
            fully_shard(model, dense, placements_for(outer, inside))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        fully_shard_optimizer(optimizer)
        alone = torch.optim.SGD(reference.parameters(), lr=0.3)
        for step in range(4):
            optimizer.zero_grad()
            alone.zero_grad()
            for index in range(microbatches):
                for other in range(world_size):
                    (_loss(reference, step, index, other) / world_size).backward()
                with microbatch(context, is_last=index == microbatches - 1):
                    _loss(model, step, index, rank).backward()
            expected = torch.stack(
                [p.grad.norm() for p in reference.parameters() if p.grad is not None]
            ).norm()
            torch.testing.assert_close(gradient_norm(model), expected, rtol=1e-5, atol=0)
            if step == 2:
                clip_gradients(model, 0.1)
                nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
                torch.testing.assert_close(
                    gradient_norm(model), torch.tensor(0.1), rtol=1e-3, atol=0
                )
            optimizer.step()
            alone.step()
        whole = dict(reference.named_parameters())
        for parameter in sharded_parameters(model):
            expected = whole[parameter.name].detach()
            if parameter.name == "experts.weight":
                expected = expected.chunk(expert)[group.rank()]
            rows = expected[parameter.row_start : parameter.row_stop]
            torch.testing.assert_close(parameter.local.detach(), rows, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("world_size", "expert", "inner", "levels", "microbatches"),
    [
        (4, 2, 2, LADDER, 1),
        (4, 2, 4, [(P, P)], 3),
        (4, 4, 4, [(R, R), (O, O), (P, P)], 3),
        (2, 2, 2, [(R, R), (O, O), (O, P), (P, P)], 3),
        (1, 1, 1, [(R, R), (P, P)], 4),
    ],
)
def test_experts_train_like_one_process(
    ranks: RankPool,
    world_size: int,
    expert: int,
    inner: int,
    levels: list[tuple[Level, Level]],
    microbatches: int,
) -> None:
    ranks.run(world_size, _trains_like_one_process, expert, inner, levels, microbatches)


def _exact_scale(level: Level, divisor: float) -> list[torch.Tensor]:
    """Two backwards of sum(x) with x = rank + 1: the mean is (W + 1) / 2, twice."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    model = nn.Linear(1, world_size, bias=False)
    mesh = mesh_of((world_size,))
    sharded = shard(model, mesh, placements_on(mesh, level, level), [], grad_divisor=divisor)
    for is_last in (False, True):
        sharded.context.is_last = is_last
        model(torch.full((1, 1), rank + 1.0)).sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("divisor", [1, 4])
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("level", Level)
def test_gradients_are_exact(
    ranks: RankPool, level: Level, world_size: int, divisor: float
) -> None:
    for [gradient] in ranks.run(world_size, _exact_scale, level, divisor):
        assert torch.equal(gradient, torch.full_like(gradient, (world_size + 1) / divisor))


def _norms() -> list[float]:
    """The norm of one gradient under every placement of a 2 x 2 mesh."""
    mesh, rank = mesh_of((2, 2)), dist.get_rank()
    norms = []
    for outer, inner in LADDER:
        sharded = shard(build(), mesh, placements_on(mesh, outer, inner))
        loss_of(sharded.model, batch(0, 0, rank)).backward()
        norms.append(gradient_norm(sharded.model).item())
    sharded.context.is_last = False
    other = shard(build(), mesh, placements_on(mesh, O, P))
    other.context.is_last = False
    loss_of(other.model, batch(0, 0, rank)).backward()
    with pytest.raises(WorkError, match="last microbatch"):
        gradient_norm(other.model)
    with pytest.raises(ConfigError, match="clip"):
        clip_gradients(sharded.model, 0.0)
    return norms


def test_the_norm_does_not_depend_on_the_placement(ranks: RankPool) -> None:
    found = ranks.run(4, _norms)
    assert all(norms == found[0] for norms in found), "ranks disagree about the norm"
    reference = build()
    for rank in range(4):
        (loss_of(reference, batch(0, 0, rank)) / 4).backward()
    gradients = [p.grad for p in reference.parameters() if p.grad is not None]
    expected = torch.stack([gradient.norm() for gradient in gradients]).norm().item()
    assert found[0] == pytest.approx([expected] * len(LADDER), rel=1e-5)


def _apart() -> None:
    """Units on meshes of which none contains the other have no common norm."""
    rows = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    placements = placements_on(mesh_of((4,)), P, P)
    with fully_shard_context("cpu"):
        fully_shard(model[0], rows["a"], _renamed(placements, "a"))
        fully_shard(model, rows["b"], _renamed(placements, "b"))
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ConfigError, match="does not contain"):
        gradient_norm(model)


def _renamed(placements: Any, axis: str) -> Any:
    return type(placements)(
        axes=(axis,),
        parameter=placements.parameter,
        gradient=placements.gradient,
        optimizer=placements.optimizer,
    )


def test_meshes_without_a_common_one_have_no_norm(ranks: RankPool) -> None:
    ranks.run(4, _apart)
