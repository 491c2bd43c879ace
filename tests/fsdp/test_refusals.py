"""What the adapter refuses, by name, before any harm is done (A10)."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shoal.errors import ConfigError, ShoalError, WorkError
from shoal.fsdp import (
    Placements,
    Replicate,
    Shard,
    fully_shard,
    fully_shard_context,
    sharded_parameters,
    sync_weights,
)
from tests.fsdp.toys import P, mesh_of, placements_on, shard
from tests.ranks import RankPool


def _refused(kind: type[ShoalError], match: str, deed: Callable[[], Any]) -> None:
    with pytest.raises(kind, match=match):
        deed()


def _at_construction() -> None:
    mesh = mesh_of((1,))
    placements = placements_on(mesh, P, P)
    linear = nn.Linear(2, 2)
    _refused(WorkError, "inside", lambda: fully_shard(linear, mesh, placements))
    with fully_shard_context("cpu"):
        _refused(WorkError, "inside itself", lambda: fully_shard_context("cpu").__enter__())
        for divisor in (0, -1, float("nan")):
            _refused(
                ConfigError,
                "grad_divisor",
                lambda d=divisor: fully_shard(linear, mesh, placements, grad_divisor=d),  # type: ignore[misc]
            )
        wide = init_device_mesh("cpu", (1, 1), mesh_dim_names=("outer", "inner"))
        _refused(ConfigError, "placements.axes", lambda: fully_shard(linear, wide, placements))
        for axes in (("nonsense",), (3,), (-2,)):
            _refused(
                ConfigError,
                "placements.axes",
                lambda a=axes: fully_shard(linear, mesh, _on(a)),  # type: ignore[misc]
            )
        for both in (("inner", "outer"), (1, 0), (0, 0)):
            _refused(
                ConfigError,
                "placements.axes",
                lambda b=both: fully_shard(linear, wide, _on(b)),  # type: ignore[misc]
            )
        for odd, match in (
            (nn.Parameter(torch.zeros(())), "has none"),
            (nn.Parameter(torch.zeros(2, 0)), "has none"),
            (nn.Parameter(torch.zeros(2, dtype=torch.float64)), "float64"),
        ):
            holder = nn.Module()
            holder.even = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
            holder.odd = odd
            before = dict(holder.named_parameters())
            _refused(ConfigError, match, lambda h=holder: fully_shard(h, mesh, placements))  # type: ignore[misc]
            assert type(holder) is nn.Module, "a refused module keeps its class"
            assert all(before[name] is p for name, p in holder.named_parameters())
        tied = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        tied[1].weight = tied[0].weight
        fully_shard(tied[0], mesh, placements)
        _refused(ConfigError, "sharded already", lambda: fully_shard(tied[0], mesh, placements))
        _refused(ConfigError, "another unit owns", lambda: fully_shard(tied, mesh, placements))
        fully_shard(linear, mesh, _on((-1,)))
    with fully_shard_context("cpu"):
        parent = nn.Sequential(linear)
        _refused(
            ConfigError,
            "another fully_shard_context",
            lambda: fully_shard(parent, mesh, placements),
        )
    with fully_shard_context("cpu"):
        pass
    meta = torch.device("meta")
    with fully_shard_context(meta):
        _refused(ConfigError, "device", lambda: fully_shard(nn.Linear(2, 2), mesh, placements))


def _on(axes: tuple[str | int, ...]) -> Placements:
    kinds = tuple(Shard(0) for _ in axes)
    return Placements(axes=axes, parameter=kinds, gradient=kinds, optimizer=kinds)


def test_construction(ranks: RankPool) -> None:
    ranks.run(1, _at_construction)


def _afterwards() -> None:
    mesh = mesh_of((2,))
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    model.register_buffer("scale", torch.ones(3))
    shard(model, mesh, placements_on(mesh, P, P), list(model.children())[:1])
    _refused(WorkError, "copied", lambda: copy.deepcopy(model))
    _refused(WorkError, "copied", lambda: pickle.dumps(model))
    state = model.state_dict()
    _refused(WorkError, "assign", lambda: model.load_state_dict(state, assign=True))
    model.load_state_dict(state)
    _refused(WorkError, "cannot become torch.float64", lambda: model.double())
    _refused(WorkError, "cannot become torch.float32 on meta", lambda: model.to("meta"))
    assert model.float() is model
    assert all(p.dtype == torch.float32 for p in model.parameters())
    _refused(WorkError, "copies", lambda: model._apply(torch.clone))

    fresh = nn.Sequential(nn.Linear(4, 6))
    shard(fresh, mesh, placements_on(mesh, P, P), [])
    fresh[0].weight = nn.Parameter(torch.zeros(6, 4))
    _refused(WorkError, "0.weight was replaced", lambda: fresh(torch.ones(1, 4)))

    inner = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    with fully_shard_context("cpu"):
        fully_shard(inner[0], mesh, placements_on(mesh, P, P))
    _refused(ConfigError, "no unit owns", lambda: sharded_parameters(inner))

    changed = nn.Linear(4, 6)
    shard(changed, mesh, placements_on(mesh, P, P), [])
    loss = changed(torch.ones(1, 4)).sum()
    sync_weights(changed)
    _refused(WorkError, "changed between its forward and its backward", loss.backward)


def test_use(ranks: RankPool) -> None:
    ranks.run(2, _afterwards)


def _recursive() -> None:
    class Recursive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, value: torch.Tensor, depth: int = 1) -> torch.Tensor:
            out: torch.Tensor = self(value, depth - 1) if depth else self.layer(value)
            return out

    mesh, model = mesh_of((1,)), Recursive()
    shard(model, mesh, placements_on(mesh, P, P), [])
    _refused(WorkError, "calls itself", lambda: model(torch.ones(1, 2)))
    model(torch.ones(1, 2), 0).sum().backward()


def test_recursion(ranks: RankPool) -> None:
    ranks.run(1, _recursive)


def _empty() -> None:
    """A unit without parameters, or with parameters only in inner units, is a fine root."""
    mesh = mesh_of((2,))
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    sharded = shard(
        model,
        mesh,
        placements_on(mesh, P, P),
        list(model.children()),
    )
    model(torch.ones(1, 4)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert len(sharded.context.units) == 4
    replicate = Placements(
        axes=("inner",),
        parameter=(Replicate(),),
        gradient=(Shard(0),),
        optimizer=(Shard(0),),
    )
    shard(nn.ReLU(), mesh, replicate, [])


def test_units_without_parameters(ranks: RankPool) -> None:
    ranks.run(2, _empty)
