"""Parameters that are frozen, wholly or in part, and thaw or freeze while training goes on."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from shoal.fsdp import fully_shard_optimizer, microbatch
from shoal.fsdp.inventory import groups_of
from tests.fsdp.toys import (
    LADDER,
    Tower,
    assert_same_weights,
    batch,
    build,
    loss_of,
    mesh_of,
    placements_on,
    shard,
)
from tests.ranks import RankPool


def _set_flags(model: Tower, step: int) -> None:
    """Embedding thaws at step 1, the first block's up at 2; the head freezes at 3."""
    model.embedding.requires_grad_(step >= 1)
    model.blocks[0].get_submodule("up").requires_grad_(step >= 2)
    model.head.requires_grad_(step < 3)


def _thaws() -> None:
    mesh, rank = mesh_of((2, 2)), dist.get_rank()
    for outer, inner in LADDER:
        model, reference = build(), build()
        _set_flags(model, 0)
        sharded = shard(model, mesh, placements_on(mesh, outer, inner))
        frozen = [group for group in groups_of(model) if group.gradients is None]
        assert [len(group.entries) for group in frozen] == [1, 2], "the embedding; up of a block"
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        alone = torch.optim.SGD(reference.parameters(), lr=0.5)
        fully_shard_optimizer(optimizer)
        for step in range(5):
            _set_flags(model, step)
            _set_flags(reference, step)
            optimizer.zero_grad()
            alone.zero_grad()
            for index in range(2):
                for other in range(4):
                    (loss_of(reference, batch(step, index, other)) / 4).backward()
                with microbatch(sharded.context, is_last=index == 1):
                    loss_of(model, batch(step, index, rank)).backward()
            for name, parameter in model.named_parameters():
                assert (parameter.grad is None) == (reference.get_parameter(name).grad is None), (
                    name
                )
            optimizer.step()
            alone.step()
        assert_same_weights(model, reference, 1e-5, 1e-6)
        assert all(group.gradients is not None for group in groups_of(model))


def test_parameters_thaw_and_freeze(ranks: RankPool) -> None:
    ranks.run(4, _thaws)


class Adapted(nn.Module):
    """A frozen layer with a trainable low-rank path beside it; inputs want gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8)
        self.down = nn.Linear(8, 2, bias=False)
        self.up = nn.Linear(2, 8, bias=False)
        self.base.requires_grad_(False)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Same shape."""
        # The low-rank path comes last, so its gradients arrive before backward reads the base.
        base = torch.tanh(self.base(value))
        out: torch.Tensor = base + self.up(self.down(value))
        return out


def _adapters() -> None:
    mesh, rank = mesh_of((2,)), dist.get_rank()
    for outer, inner in ((level, level) for _, level in LADDER[::3]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), *(Adapted() for _ in range(3)))
        model.append(nn.Sequential(nn.Linear(8, 8)).requires_grad_(False))
        torch.manual_seed(0)
        reference = nn.Sequential(nn.Linear(8, 8), *(Adapted() for _ in range(3)))
        reference.append(nn.Sequential(nn.Linear(8, 8)).requires_grad_(False))
        sharded = shard(model, mesh, placements_on(mesh, outer, inner), list(model.children())[1:])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        alone = torch.optim.SGD(reference.parameters(), lr=0.5)
        fully_shard_optimizer(optimizer)
        values = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(7))
        for _ in range(3):
            optimizer.zero_grad()
            alone.zero_grad()
            model(values[rank]).square().mean().backward()
            for value in values:
                (reference(value).square().mean() / 2).backward()
            optimizer.step()
            alone.step()
        assert_same_weights(model, reference, 1e-5, 1e-6)
        assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
        reductions = sum(c.operation != "all_gather" for c in sharded.ledger.collectives)
        assert reductions == 3 * 4, "frozen groups are not reduced"


def test_adapters_beside_frozen_layers(ranks: RankPool) -> None:
    ranks.run(2, _adapters)
