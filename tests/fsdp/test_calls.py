"""Calls out of the ordinary: each trains as in one process, or is refused by name."""

from __future__ import annotations

from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from shoal.errors import ConfigError, WorkError
from shoal.fsdp import fully_shard, fully_shard_context, fully_shard_optimizer
from shoal.fsdp import sharded_parameters as _parameters
from tests.fsdp.toys import (
    LADDER,
    P,
    R,
    Sharded,
    Tower,
    assert_same_weights,
    at_rest,
    batch,
    build,
    loss_of,
    mesh_of,
    placements_on,
    shard,
    train,
    train_alone,
)
from tests.ranks import RankPool


def _sharded_tower() -> Sharded:
    mesh = mesh_of((dist.get_world_size(),))
    return shard(build(), mesh, placements_on(mesh, P, P))


def _unusual_calls() -> None:
    """Evaluation between forward and backward, several forwards, one graph differentiated twice."""
    reference, sharded = build(), _sharded_tower()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    losses = [loss_of(sharded.model, batch(0, index, rank)) for index in range(2)]
    with torch.no_grad():
        evaluated = loss_of(sharded.model, batch(0, 0, rank))
    with torch.inference_mode():
        inferred = loss_of(sharded.model, batch(0, 0, rank))
    assert at_rest(sharded.model)
    torch.testing.assert_close(evaluated, losses[0].detach())
    torch.testing.assert_close(inferred.clone(), losses[0].detach())
    losses[0].backward(retain_graph=True)
    (losses[0] + losses[1]).backward()
    for other in range(world_size):
        alone = [loss_of(reference, batch(0, index, other)) for index in range(2)]
        ((2 * alone[0] + alone[1]) / world_size).backward()
    whole = dict(reference.named_parameters())
    for name, parameter in sharded.model.named_parameters():
        gradient = whole[name].grad
        assert gradient is not None
        assert parameter.grad is not None
        rows = next(p for p in _parameters(sharded.model) if p.name == name)
        torch.testing.assert_close(
            parameter.grad, gradient[rows.row_start : rows.row_stop], rtol=1e-5, atol=1e-7
        )
    assert at_rest(sharded.model)


def test_unusual_calls(ranks: RankPool) -> None:
    ranks.run(2, _unusual_calls)


class _Repeated(nn.Module):
    """The same block three times, recomputed or not."""

    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6)
        self.block = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.again = self.block
        self._use_reentrant = use_reentrant

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Same shape."""
        value = self.first(value)
        for block in (self.block, self.again, self.block):
            if self._use_reentrant is None:
                value = block(value)
            else:
                value = checkpoint(block, value, use_reentrant=self._use_reentrant)
        return value


def _repeats() -> None:
    mesh, rank = mesh_of((2, 2)), dist.get_rank()
    values = torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(1))
    for use_reentrant in (None, False, True):
        for outer, inner in LADDER:
            model, reference = _Repeated(use_reentrant), _Repeated(None)
            sharded = shard(model, mesh, placements_on(mesh, outer, inner), [model.block])
            assert len(sharded.context.units) == 2
            for index in range(2):
                sharded.context.is_last = index == 1
                model(values[rank]).square().mean().backward()
                for value in values:
                    (reference(value).square().mean() / 4).backward()
            for parameter in _parameters(model):
                expected = reference.get_parameter(parameter.name).grad
                assert expected is not None
                rows = expected[parameter.row_start : parameter.row_stop]
                torch.testing.assert_close(parameter.local.grad, rows, rtol=1e-5, atol=1e-7)
            names = [parameter.names for parameter in _parameters(model)]
            assert ("block.0.weight", "again.0.weight") in names


def test_a_unit_may_run_several_times(ranks: RankPool) -> None:
    ranks.run(4, _repeats)


class _Refuse(torch.autograd.Function):
    """Passes forward, raises in backward."""

    @staticmethod
    def forward(ctx: object, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("scripted")


def _failures() -> None:
    sharded, rank = _sharded_tower(), dist.get_rank()
    model = sharded.model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    fully_shard_optimizer(optimizer)
    block = cast(Tower, model).blocks[1]

    handle = block.register_forward_pre_hook(_raise)
    with pytest.raises(ArithmeticError):
        loss_of(model, batch(0, 0, rank))
    handle.remove()
    assert at_rest(model)

    handle = block.register_forward_hook(_refuse_backward)
    with pytest.raises(ArithmeticError):
        loss_of(model, batch(0, 0, rank)).backward()
    handle.remove()
    with pytest.raises(WorkError, match="reset"):
        loss_of(model, batch(0, 0, rank))
    with pytest.raises(WorkError, match="end of backward"):
        optimizer.step()
    sharded.context.reset()
    assert at_rest(model)
    assert all(parameter.grad is None for parameter in model.parameters())

    losses = train(sharded, optimizer, steps=2, microbatches=1)
    reference = build()
    alone = torch.optim.SGD(reference.parameters(), lr=0.5)
    assert losses == pytest.approx(
        train_alone(reference, alone, steps=2, microbatches=1, ranks=2), rel=1e-5
    )
    assert_same_weights(model, reference, 1e-5, 1e-6)


def _refuse_backward(_: nn.Module, __: object, output: torch.Tensor) -> torch.Tensor:
    refused: torch.Tensor = _Refuse.apply(output)  # type: ignore[no-untyped-call]
    return refused


def _raise(*_: object) -> None:
    raise ArithmeticError("scripted")


def test_a_failure_is_recovered_from_or_named(ranks: RankPool) -> None:
    ranks.run(2, _failures)


class _Odd(nn.Module):
    def __init__(self, output: str) -> None:
        super().__init__()
        self.used = nn.Linear(3, 3)
        self.spare = nn.Linear(3, 3)
        self._output = output

    def forward(self, value: torch.Tensor) -> object:
        out = self.used(value)
        if self._output == "hidden":
            return _Box(out)
        return {"nested": [(out, None)]}


class _Box:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class _Penalized(nn.Module):
    """Differentiates an inner unit in the middle of its own forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        self.outer = nn.Linear(3, 3)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Rows of 3."""
        value = self.outer(value)
        point = value.detach().requires_grad_()
        [slope] = torch.autograd.grad(self.inner(point).sum(), point)
        out: torch.Tensor = self.outer(self.inner(value)) * slope
        return out


class _Skipping(nn.Module):
    """Leaves its second layer out when told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.skips = False

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Rows of 3."""
        value = self.first(value)
        return value if self.skips else self.second(value)


def _uneven_paths() -> None:
    """A forward that differentiates, and units that some microbatches do not reach."""
    mesh, rank = mesh_of((2, 2)), dist.get_rank()
    values = torch.randn(4, 3, 3, generator=torch.Generator().manual_seed(1))
    for outer, inner in LADDER:
        penalized, like_it = _Penalized(), _Penalized()
        shard(penalized, mesh, placements_on(mesh, outer, inner), [penalized.inner])
        penalized(values[rank]).sum().backward()
        skipping, like_that = _Skipping(), _Skipping()
        placements = placements_on(mesh, outer, inner)
        sharded = shard(skipping, mesh, placements, [skipping.first, skipping.second])
        for index, skips in enumerate((False, True)):
            sharded.context.is_last = index == 1
            skipping.skips = like_that.skips = skips
            skipping(values[rank]).sum().backward()
            for value in values:
                (like_that(value).sum() / 4).backward()
        for value in values:
            (like_it(value).sum() / 4).backward()
        for model, reference in ((penalized, like_it), (skipping, like_that)):
            assert at_rest(model)
            for parameter in _parameters(model):
                expected = reference.get_parameter(parameter.name).grad
                assert expected is not None
                rows = expected[parameter.row_start : parameter.row_stop]
                torch.testing.assert_close(parameter.local.grad, rows, rtol=1e-5, atol=1e-6)


def test_paths_may_differ_from_call_to_call(ranks: RankPool) -> None:
    ranks.run(4, _uneven_paths)


def _used_elsewhere() -> None:
    """A weight that another unit reads is not averaged; the replica must not go unnoticed."""

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(self.layer(value), self.layer.weight)

    mesh, model = mesh_of((2,)), Reader()
    shard(model, mesh, placements_on(mesh, R, R), [model.layer])
    with pytest.raises(WorkError, match="weight was used outside the forward"):
        model(torch.ones(1, 3)).sum().backward()


def test_a_weight_used_by_another_unit_is_noticed(ranks: RankPool) -> None:
    ranks.run(2, _used_elsewhere)


def _misuses() -> None:
    mesh, placements = mesh_of((1,)), placements_on(mesh_of((1,)), P, P)
    with fully_shard_context("cpu"):
        early = nn.Linear(3, 3)
        fully_shard(early, mesh, placements)
        with pytest.raises(WorkError, match="leave the block"):
            early(torch.ones(1, 3))
    hidden, unused = _Odd("hidden"), _Odd("nested")
    with fully_shard_context("cpu") as context:
        fully_shard(hidden, mesh, placements)
        fully_shard(unused, mesh, placements)
    with pytest.raises(ConfigError, match="_Box"):
        hidden(torch.ones(1, 3))
    with pytest.raises(WorkError, match="made no gradient for spare.weight, spare.bias"):
        unused(torch.ones(1, 3))["nested"][0][0].sum().backward()
    context.reset()
    for parameter in unused.spare.parameters():
        parameter.requires_grad_(False)
    unused(torch.ones(1, 3))["nested"][0][0].sum().backward()
    assert unused.used.weight.grad is not None
    assert unused.spare.weight.grad is None


def test_misuse_is_named(ranks: RankPool) -> None:
    ranks.run(1, _misuses)
