"""A small model of awkward sizes, at any layout, and what every rank holds of it put together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shoal.config import Level
from shoal.fsdp import (
    MixedPrecision,
    fully_shard,
    fully_shard_context,
    fully_shard_optimizer,
    microbatch,
    placements_for,
    sharded_parameters,
)

VOCABULARY, HIDDEN = 257, 66

Layout = tuple[int, int, Level, Level]
"""Outer and inner size, outer and inner level."""

HFSDP: Layout = (2, 2, Level.OPTIMIZER, Level.PARAMETERS)
HSDP: Layout = (2, 2, Level.REPLICATE, Level.PARAMETERS)
ALONE: Layout = (1, 1, Level.PARAMETERS, Level.PARAMETERS)
DDP_2: Layout = (1, 2, Level.REPLICATE, Level.REPLICATE)
ZERO1_2: Layout = (1, 2, Level.OPTIMIZER, Level.OPTIMIZER)
ZERO1_4: Layout = (1, 4, Level.OPTIMIZER, Level.OPTIMIZER)
ZERO3_3: Layout = (1, 3, Level.PARAMETERS, Level.PARAMETERS)

State = dict[str, dict[str, torch.Tensor]]
"""By parameter: ``weight`` and every state of the optimizer, whole."""


class Toy(nn.Module):
    """A tied decoder-like model; 257 x 66, a one-element bias, a frozen part, a buffer, dropout."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.block = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Dropout(0.1), nn.Tanh())
        self.norm = nn.LayerNorm(HIDDEN)
        self.frozen = nn.Linear(HIDDEN, HIDDEN, bias=False).requires_grad_(False)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Linear(1, 1)
        self.register_buffer("offset", torch.randn(3))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        hidden = hidden + self.block(hidden) + self.frozen(hidden)
        logits = self.head(self.norm(hidden))
        loss = nn.functional.cross_entropy(logits[:-1], tokens[1:])
        result: torch.Tensor = loss * self.scale(loss.new_ones(1, 1)).sum()
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A sharded model and its optimizer on one rank."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    context: Any

    def step(self, number: int) -> float:
        """One step on data of this rank and this step; the loss before it."""
        generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
        tokens = torch.randint(VOCABULARY, (9,), generator=generator)
        with microbatch(self.context, is_last=True):
            loss = self.model(tokens)
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss)


def build(
    layout: Layout,
    *,
    seed: int,
    compute: torch.dtype | None = None,
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
    **options: Any,
) -> Run:
    """A toy at a layout, inside the default group."""
    outer, inner, outer_level, inner_level = layout
    mesh = init_device_mesh("cpu", (outer, inner), mesh_dim_names=("outer", "inner"))
    placements = placements_for(outer_level, inner_level)
    precision = MixedPrecision(compute=compute)
    model = Toy(seed)
    with fully_shard_context(torch.device("cpu")) as context:
        fully_shard(model.block, mesh, placements, precision=precision)
        fully_shard(model, mesh, placements, precision=precision)
    trained = [p.local for p in sharded_parameters(model) if p.local.requires_grad]
    if not options.get("fused"):  # either way must do: with parameters of no rows, and without
        trained = [local for local in trained if local.numel()]
    made = optimizer(trained, **{"lr": 0.01, **options})
    fully_shard_optimizer(made)
    return Run(model=model, optimizer=made, context=context)


def held_rows(run: Run) -> dict[str, dict[str, tuple[int, torch.Tensor]]]:
    """Rows of weights and moments on this rank, each with its first row."""
    return {
        parameter.name: {
            name: (parameter.row_start, value.detach().clone())
            for name, value in {
                "weight": parameter.local,
                **run.optimizer.state.get(parameter.local, {}),
            }.items()
        }
        for parameter in sharded_parameters(run.model)
        if parameter.local.numel()
    }


def whole(ranks: list[dict[str, dict[str, tuple[int, torch.Tensor]]]]) -> State:
    """Put the rows of all ranks together; replicas must agree."""
    rows: dict[str, dict[str, dict[int, torch.Tensor]]] = {}
    for held in ranks:
        for parameter, values in held.items():
            for name, (start, value) in values.items():
                known = rows.setdefault(parameter, {}).setdefault(name, {})
                assert torch.equal(known.setdefault(start, value), value)
    return {
        parameter: {name: _joined(parts) for name, parts in values.items()}
        for parameter, values in rows.items()
    }


def _joined(parts: dict[int, torch.Tensor]) -> torch.Tensor:
    values = [parts[start] for start in sorted(parts)]
    if values[0].ndim:
        return torch.cat(values)
    assert all(torch.equal(value, values[0]) for value in values)
    return values[0]


def assert_equal_states(actual: State, expected: State) -> None:
    """Bit-equal values under equal names."""
    assert actual.keys() == expected.keys()
    for parameter, values in expected.items():
        assert actual[parameter].keys() == values.keys()
        for name, value in values.items():
            assert actual[parameter][name].dtype == value.dtype
            assert torch.equal(actual[parameter][name], value), f"{parameter} {name}"
