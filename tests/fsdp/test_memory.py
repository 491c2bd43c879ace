"""What buffers take at rest and at their peak, and that all of it goes with the model (A9)."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shoal.config import Level
from shoal.errors import WorkError
from shoal.fsdp import (
    BytesAtRest,
    MixedPrecision,
    Transport,
    bytes_at_rest,
    fully_shard_optimizer,
    sharded_parameters,
    sync_weights,
)
from shoal.fsdp.inventory import groups_of
from shoal.fsdp.weights import WeightBuffers
from tests.fsdp.toys import (
    LADDER,
    P,
    R,
    Sharded,
    Tower,
    assert_same_weights,
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

BF16 = torch.bfloat16


class Even(nn.Module):
    """Blocks of one size whose layout needs no padding: 64 x 64, four of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(4))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Same shape."""
        for block in self.blocks:
            value = torch.tanh(block(value))
        return value


PARAMETERS = 4 * 64 * 64


def _expected(outer: Level, inner: Level, compute: torch.dtype) -> BytesAtRest:
    """The formula, for a 2 x 2 mesh and fp32 main weights and gradients."""

    def share(at_least: Level) -> int:
        depth = list(Level).index(at_least)
        num_sharded = sum(list(Level).index(level) >= depth for level in (outer, inner))
        return 1 << num_sharded

    rests = share(Level.PARAMETERS)
    updated = share(Level.OPTIMIZER)
    aliased = compute == torch.float32 and rests == updated
    return BytesAtRest(
        main_weights=4 * PARAMETERS // updated,
        compute_weights=0 if aliased else compute.itemsize * PARAMETERS // rests,
        gradients=4 * PARAMETERS // updated,
    )


def _bytes_of_every_placement() -> None:
    mesh = mesh_of((2, 2))
    for compute in (torch.float32, BF16):
        for outer, inner in LADDER:
            model = Even()
            sharded = shard(
                model,
                mesh,
                placements_on(mesh, outer, inner),
                precision=MixedPrecision(compute=compute),
            )
            expected = _expected(outer, inner, compute)
            assert bytes_at_rest(model) == expected, (outer, inner, compute)
            assert _allocated(model) == expected.total
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            fully_shard_optimizer(optimizer)
            for index in range(3):
                sharded.context.is_last = index == 2
                model(torch.ones(3, 64, dtype=compute)).float().sum().backward()
            optimizer.step()
            assert _allocated(model) == expected.total, (outer, inner, compute)


def _allocated(model: nn.Module) -> int:
    """Bytes of all storages behind a model's buffers, each counted once."""
    storages = {}
    for group in groups_of(model):
        weights, gradients = group.weights, group.gradients
        assert gradients is not None and isinstance(weights, WeightBuffers)
        for buffer in (weights.main, weights.model, weights.whole, gradients.final):
            storage = buffer.data.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def test_bytes_at_rest_follow_the_formula(ranks: RankPool) -> None:
    ranks.run(4, _bytes_of_every_placement)


def _peaks(overlap: bool, transport: Transport) -> list[float]:
    """Full-size buffers of a unit that are in memory at once at the peak of each step."""
    mesh = mesh_of((2,))
    model = Even()
    sharded = shard(model, mesh, placements_on(mesh, P, P), overlap=overlap, transport=transport)
    unit_bytes = 64 * 64 * 4
    peaks = []
    for _ in range(6):
        sharded.ledger.clear()
        model(torch.ones(3, 64)).sum().backward()
        peaks.append(sharded.ledger.peak_staging_bytes / unit_bytes)
        deadline = time.monotonic() + 5
        while sharded.ledger.staging_bytes and time.monotonic() < deadline:
            time.sleep(0.001)
        assert sharded.ledger.staging_bytes == 0
    return peaks


@pytest.mark.parametrize(("overlap", "bound"), [(True, 5), (False, 4)])
@pytest.mark.parametrize("transport", [Transport.GLOO, Transport.SHARED_MEMORY])
def test_few_full_size_buffers_exist_at_once(
    ranks: RankPool, overlap: bool, bound: int, transport: Transport
) -> None:
    for peaks in ranks.run(2, _peaks, overlap, transport):
        # Gloo's own threads may hold on to a buffer a moment longer than the schedule does; there
        # the step that they disturb least tells what the schedule needs.
        peak = min(peaks) if transport is Transport.GLOO else max(peaks)
        assert 1 < peak < bound


def _storages(model: nn.Module) -> list[weakref.ref[Any]]:
    found = []
    for group in groups_of(model):
        weights, gradients = group.weights, group.gradients
        assert gradients is not None and isinstance(weights, WeightBuffers)
        for buffer in (weights.main, weights.model, weights.whole, gradients.final):
            found.append(weakref.ref(buffer.data.untyped_storage()))
    return found


def _gone_with_the_model() -> None:
    mesh, rank = mesh_of((2,)), dist.get_rank()
    for level in Level:
        sharded = shard(build(), mesh, placements_on(mesh, level, level))
        optimizer = torch.optim.AdamW(sharded.model.parameters(), lr=0.1)
        context = sharded.context
        train(sharded, optimizer, steps=1, microbatches=2)
        loss_of(sharded.model, batch(1, 0, rank)).backward()
        storages = _storages(sharded.model)
        assert all(storage() is not None for storage in storages)
        gc.disable()
        try:
            del sharded, optimizer
            assert not [storage for storage in storages if storage() is not None], level
        finally:
            gc.enable()
        assert context.units == []


def test_storage_goes_with_the_model_without_garbage_collection(ranks: RankPool) -> None:
    ranks.run(2, _gone_with_the_model)


class _KeepView(torch.autograd.Function):
    """Saves a view of a weight for backward, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        view = weight.t()
        ctx.save_for_backward(value, view)
        return value @ view

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        value, view = ctx.saved_tensors
        return gradient @ view.t(), gradient.t() @ value


class _Viewing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(12.0).view(3, 4))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _KeepView.apply(value, self.weight)  # type: ignore[no-untyped-call]
        return out


def _saved_views() -> None:
    mesh, model = mesh_of((2,)), _Viewing()
    shard(model, mesh, placements_on(mesh, P, P), [])
    [group] = groups_of(model)
    storage = group.weights.whole.data.untyped_storage()
    assert storage.nbytes() == 0
    value = torch.ones(2, 4, requires_grad=True)
    out = model(value)
    assert storage.nbytes() == 0, "released between forward and backward"
    out.sum().backward()
    assert storage.nbytes() == 0
    torch.testing.assert_close(value.grad, torch.tensor([[12.0, 15, 18, 21]] * 2))


def test_a_view_saved_for_backward_survives_the_release(ranks: RankPool) -> None:
    ranks.run(2, _saved_views)


def _from_meta() -> None:
    mesh, rank = mesh_of((2, 2)), dist.get_rank()
    reference = build(tied=True)
    whole = dict(reference.named_parameters())
    for outer, inner in ((R, P), (P, P), (Level.OPTIMIZER, Level.GRADIENTS)):
        with torch.device("meta"):
            model = Tower(tied=True)
        sharded = shard(model, mesh, placements_on(mesh, outer, inner))
        with pytest.raises(WorkError, match="sync_weights"):
            loss_of(model, batch(0, 0, rank))
        for parameter in sharded_parameters(model):
            rows = whole[parameter.name][parameter.row_start : parameter.row_stop]
            with torch.no_grad():
                parameter.local.copy_(rows)
        sync_weights(model)
        assert model.head.weight is model.embedding.weight
        copy = build(tied=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        alone = torch.optim.SGD(copy.parameters(), lr=0.5)
        losses = train(sharded, optimizer, steps=2, microbatches=1)
        expected = train_alone(copy, alone, steps=2, microbatches=1, ranks=4)
        assert losses == pytest.approx(expected, rel=1e-5)
        assert_same_weights(model, copy, 1e-5, 1e-6)


def test_models_built_on_the_meta_device(ranks: RankPool) -> None:
    ranks.run(4, _from_meta)


def _tied() -> None:
    """Tied embedding and head: one parameter, one entry, equal after every cycle (A12)."""
    mesh = mesh_of((2,))
    for level in Level:
        reference = build(tied=True)
        sharded: Sharded = shard(build(tied=True), mesh, placements_on(mesh, level, level))
        [tied] = [p for p in sharded_parameters(sharded.model) if len(p.names) > 1]
        assert tied.names == ("embedding.weight", "head.weight")
        assert tied.local is sharded.model.get_parameter("head.weight")
        entries = sum(len(group.entries) for group in groups_of(sharded.model))
        assert entries == len(list(sharded.model.parameters())) == 11
        optimizer = torch.optim.SGD(sharded.model.parameters(), lr=0.5)
        alone = torch.optim.SGD(reference.parameters(), lr=0.5)
        losses = train(sharded, optimizer, steps=3, microbatches=2)
        expected = train_alone(reference, alone, steps=3, microbatches=2, ranks=2)
        assert losses == pytest.approx(expected, rel=1e-5)
        assert_same_weights(sharded.model, reference, 1e-5, 1e-6)


def test_tied_weights_are_one_parameter(ranks: RankPool) -> None:
    ranks.run(2, _tied)
