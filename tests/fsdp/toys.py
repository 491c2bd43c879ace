"""Small models with odd sizes and the two ways to train them: sharded, and in one process."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shoal.config import Level
from shoal.fsdp import (
    Ledger,
    MixedPrecision,
    Placements,
    Schedule,
    Transport,
    fully_shard,
    fully_shard_context,
    fully_shard_optimizer,
    microbatch,
    placements_for,
    sharded_parameters,
)
from shoal.fsdp.inventory import units_of
from shoal.fsdp.unit import Phase
from shoal.fsdp.weights import WeightBuffers, Weights

R, O, G, P = Level.REPLICATE, Level.OPTIMIZER, Level.GRADIENTS, Level.PARAMETERS  # noqa: E741
LADDER = [(a, b) for b in (R, O, G, P) for a in (R, O, G, P)[: [R, O, G, P].index(b) + 1]]
"""Every pair of levels, outer and inner, that placements_for takes."""

EQUAL = [(R, R), (O, O), (G, G), (P, P)]
"""Pairs for a mesh of one dimension."""


class Block(nn.Module):
    """A residual block: rows of 66, 7 and 1 elements."""

    def __init__(self, hidden: int, narrow: int = 7) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, narrow)
        self.down = nn.Linear(narrow, hidden, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Same shape as ``hidden``."""
        residual: torch.Tensor = self.down(torch.tanh(self.up(self.norm(hidden))))
        return hidden + residual


class Tower(nn.Module):
    """Embedding, blocks and a head: tokens [B, S] to logits [B, S, vocabulary]."""

    def __init__(
        self, blocks: int = 2, hidden: int = 66, vocabulary: int = 257, tied: bool = False
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(blocks))
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits."""
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits: torch.Tensor = self.head(hidden)
        return logits


def build(seed: int = 0, *, tied: bool = False) -> Tower:
    """A tower with weights that depend on the seed alone."""
    torch.manual_seed(seed)
    return Tower(tied=tied)


def batch(step: int, microbatch_index: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels [2, 5] that differ by step, microbatch and rank."""
    generator = torch.Generator().manual_seed(1000 * step + 100 * microbatch_index + rank)
    tokens = torch.randint(257, (2, 6), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, data: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Mean cross-entropy."""
    tokens, labels = data
    logits: torch.Tensor = model(tokens)
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    """A mesh over all ranks, its dimensions named as training names them."""
    return init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[-len(shape) :])


@dataclass
class Sharded:
    """A sharded model with what its training needs."""

    model: nn.Module
    context: Schedule
    ledger: Ledger = field(default_factory=Ledger)


def shard(
    model: nn.Module,
    mesh: DeviceMesh,
    placements: Placements,
    units: Iterable[nn.Module] | None = None,
    *,
    precision: MixedPrecision | None = None,
    overlap: bool = True,
    grad_divisor: float = 1.0,
    transport: Transport = Transport.GLOO,
) -> Sharded:
    """Make units of ``units`` (by default a tower's blocks) and of the whole model."""
    ledger = Ledger(transport)
    inner = cast(Tower, model).blocks if units is None else units
    with fully_shard_context("cpu", overlap=overlap, communicators=ledger.communicator) as context:
        for module in inner:
            fully_shard(module, mesh, placements, precision=precision, grad_divisor=grad_divisor)
        fully_shard(model, mesh, placements, precision=precision, grad_divisor=grad_divisor)
    return Sharded(model, context, ledger)


def placements_on(mesh: DeviceMesh, outer: Level, inner: Level) -> Placements:
    """Placements of two levels, or of ``inner`` alone on a mesh of one dimension."""
    both = placements_for(outer, inner)
    if mesh.ndim == 2:
        return both
    return Placements(
        axes=("inner",),
        parameter=both.parameter[1:],
        gradient=both.gradient[1:],
        optimizer=both.optimizer[1:],
    )


def train(
    sharded: Sharded,
    optimizer: torch.optim.Optimizer,
    *,
    steps: int,
    microbatches: int,
    set_to_none: bool = True,
) -> list[float]:
    """Train on this rank's batches; the loss of each step, averaged over ranks."""
    fully_shard_optimizer(optimizer)
    losses = []
    for step in range(steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        total = torch.zeros(())
        for index in range(microbatches):
            with microbatch(sharded.context, is_last=index == microbatches - 1):
                loss = loss_of(sharded.model, batch(step, index, dist.get_rank())) / microbatches
                loss.backward()
            total += loss.detach()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
        optimizer.step()
    return losses


def train_alone(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    steps: int,
    microbatches: int,
    ranks: int,
) -> list[float]:
    """The same in one process, over the batches of all ranks."""
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        total = torch.zeros(())
        for index in range(microbatches):
            for rank in range(ranks):
                loss = loss_of(model, batch(step, index, rank)) / (microbatches * ranks)
                loss.backward()
                total += loss.detach()
        losses.append(total.item())
        optimizer.step()
    return losses


def at_rest(model: nn.Module) -> bool:
    """Whether every unit rests: main weights registered, no gathered weights in memory."""
    units = list(units_of(model))
    groups = [group for unit in units for group in unit.groups]
    locals_ = {id(entry.local) for group in groups for entry in group.entries}
    gathered = [group.weights.whole for group in groups if not _rests_whole(group.weights)]
    return (
        all(unit.phase is Phase.RESTING for unit in units)
        and {id(parameter) for parameter in model.parameters()} == locals_
        and all(buffer.data.untyped_storage().nbytes() == 0 for buffer in gathered)
    )


def _rests_whole(weights: Weights) -> bool:
    return isinstance(weights, WeightBuffers) and weights.whole is weights.model


def assert_same_weights(
    model: nn.Module, reference: nn.Module, rtol: float, atol: float, *, prefix: str = ""
) -> None:
    """Each row held here equals the reference's."""
    whole = {prefix + name: parameter for name, parameter in reference.named_parameters()}
    parameters = sharded_parameters(model)
    assert {p.name for p in parameters} == set(whole)
    for parameter in parameters:
        expected = whole[parameter.name][parameter.row_start : parameter.row_stop]
        torch.testing.assert_close(
            parameter.local.float(), expected.float(), rtol=rtol, atol=atol, msg=parameter.name
        )
