"""Mixed precision: what is kept, what travels and what is summed in which format (A7)."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shoal.config import Level
from shoal.errors import ConfigError, WorkError
from shoal.fsdp import MixedPrecision, fully_shard_optimizer, sharded_parameters
from shoal.fsdp.inventory import groups_of
from tests.fsdp.toys import (
    O,
    P,
    R,
    Tower,
    batch,
    build,
    loss_of,
    mesh_of,
    placements_on,
    shard,
    train,
)
from tests.ranks import RankPool

BF16 = torch.bfloat16


def _tiny_updates() -> None:
    """Updates below what bf16 resolves add up in the main weights until compute sees them."""
    model = nn.Linear(4, 2, bias=False, dtype=BF16)
    nn.init.ones_(model.weight)
    mesh = mesh_of((2,))
    sharded = shard(model, mesh, placements_on(mesh, P, P), [])
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-10)
    fully_shard_optimizer(optimizer)
    seen = []
    for _ in range(8):
        optimizer.zero_grad()
        out = model(torch.ones(1, 4, dtype=BF16))
        seen.append(out[0, 0].item())
        out.sum().backward()
        optimizer.step()
    assert model.weight.dtype == torch.float32
    torch.testing.assert_close(model.weight, torch.full_like(model.weight, 1 - 8 * 2.0**-10))
    assert seen[0] == seen[2] == 4.0  # 1 - 2 * 2**-10 rounds to 1 in bf16
    assert seen[-1] < 4.0
    for group in groups_of(model):
        assert group.weights.generation == 9  # at construction and once a step
    assert sharded.ledger.count("all_gather") == 2 * 8


def test_updates_below_the_compute_format_accumulate(ranks: RankPool) -> None:
    ranks.run(2, _tiny_updates)


def _what_travels() -> None:
    """Gradients travel as bf16 and are summed as fp32, in rank order."""
    mesh, rank, size = mesh_of((4,)), dist.get_rank(), dist.get_world_size()
    model = build().to(BF16)
    sharded = shard(model, mesh, placements_on(mesh, P, P))
    loss_of(model, batch(0, 0, rank)).backward()
    travelled = {(c.operation, c.dtype) for c in sharded.ledger.collectives}
    assert travelled == {("all_gather", BF16), ("reduce_scatter", BF16)}

    gradients = []
    for other in range(size):
        reference = build().to(BF16)
        loss_of(reference, batch(0, 0, other)).backward()
        gradients.append({n: p.grad for n, p in reference.named_parameters()})
    for parameter in sharded_parameters(model):
        assert parameter.local.grad is not None
        assert parameter.local.grad.dtype == torch.float32
        total = torch.zeros(parameter.shape)
        for contribution in gradients:
            gradient = contribution[parameter.name]
            assert gradient is not None
            total += gradient.float()
        expected = (total / size)[parameter.row_start : parameter.row_stop]
        torch.testing.assert_close(parameter.local.grad, expected, rtol=0, atol=0)


def test_gradients_travel_narrow_and_are_summed_wide(ranks: RankPool) -> None:
    ranks.run(4, _what_travels)


def _many_microbatches() -> float:
    """The gradient over 64 microbatches in bf16, against the exact mean of its contributions."""
    mesh = mesh_of((1,))
    model = build().to(BF16)
    sharded = shard(model, mesh, placements_on(mesh, P, P))
    exact = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in _whole(build())}
    for index in range(64):
        reference = build().to(BF16)
        (loss_of(reference, batch(0, index, 0)) / 64).backward()
        for name, parameter in reference.named_parameters():
            assert parameter.grad is not None
            exact[name] += parameter.grad
        (loss_of(sharded.model, batch(0, index, 0)) / 64).backward()
    gaps = []
    for sharded_parameter in sharded_parameters(model):
        total = exact[sharded_parameter.name]
        assert sharded_parameter.local.grad is not None
        difference = (sharded_parameter.local.grad - total).norm()
        gaps.append(float(difference / total.norm()))
    return max(gaps)


def _whole(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters())


def test_accumulation_does_not_drift(ranks: RankPool) -> None:
    [gap] = ranks.run(1, _many_microbatches)
    assert gap < 1e-6


def _against_masters_by_hand() -> list[tuple[list[float], list[float]]]:
    """bf16 compute over fp32 main weights under AdamW, and the same by hand in one process."""
    found = []
    for outer, inner in ((R, P), (O, P), (O, O), (P, P)):
        mesh = mesh_of((2, 2))
        sharded = shard(
            build(),
            mesh,
            placements_on(mesh, outer, inner),
            precision=MixedPrecision(compute=BF16),
        )
        optimizer = torch.optim.AdamW(sharded.model.parameters(), lr=1e-2, fused=True)
        losses = train(sharded, optimizer, steps=3, microbatches=2)

        masters, compute = build(), build().to(BF16)
        alone = torch.optim.AdamW(masters.parameters(), lr=1e-2)
        expected = []
        for step in range(3):
            total = 0.0
            alone.zero_grad()
            for index in range(2):
                for rank in range(4):
                    compute.zero_grad()
                    loss = loss_of(compute, batch(step, index, rank)) / 2
                    loss.backward()
                    total += loss.item() / 4
                    _accumulate(masters, compute, 1 / 4)
            alone.step()
            with torch.no_grad():
                for narrow, wide in zip(compute.parameters(), masters.parameters(), strict=True):
                    narrow.copy_(wide)
            expected.append(total)
        found.append((losses, expected))
    return found


def _accumulate(masters: Tower, compute: Tower, weight: float) -> None:
    for wide, narrow in zip(masters.parameters(), compute.parameters(), strict=True):
        assert narrow.grad is not None
        gradient = narrow.grad.float() * weight
        wide.grad = gradient if wide.grad is None else wide.grad + gradient


def test_narrow_compute_over_wide_main_weights(ranks: RankPool) -> None:
    for cells in ranks.run(4, _against_masters_by_hand):
        for losses, expected in cells:
            assert losses == pytest.approx(expected, abs=3e-3)


class _Mixed(nn.Module):
    """A unit with parameters of two formats, both of which want gradients or not."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(6, 5, dtype=BF16)
        self.scale = nn.Parameter(torch.linspace(1, 2, 5))
        self.frozen = nn.Parameter(torch.linspace(0, 1, 5), requires_grad=False)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Rows of 5, fp32."""
        out: torch.Tensor = self.narrow(value).float() * self.scale + self.frozen
        return out


def _several_formats() -> None:
    mesh, rank = mesh_of((2,)), dist.get_rank()
    values = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(1)).to(BF16)
    for level in Level:
        torch.manual_seed(0)
        model = _Mixed()
        torch.manual_seed(0)
        reference = _Mixed()
        sharded = shard(model, mesh, placements_on(mesh, level, level), [])
        assert len(list(groups_of(model))) == 3
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
        fully_shard_optimizer(optimizer)
        model(values[rank]).square().mean().backward()
        assert {c.dtype for c in sharded.ledger.collectives if c.operation != "all_gather"} == {
            BF16,
            torch.float32,
        }
        optimizer.step()
        for value in values:
            (reference(value).square().mean() / 2).backward()
        for parameter in sharded_parameters(model):
            whole = reference.get_parameter(parameter.name)
            gradient = 0.0 if whole.grad is None else whole.grad.float()
            expected = (whole.float() - 0.25 * gradient)[parameter.row_start : parameter.row_stop]
            torch.testing.assert_close(parameter.local, expected, rtol=1e-2, atol=1e-3)
            assert parameter.local.dtype == torch.float32


def test_a_unit_may_hold_several_formats(ranks: RankPool) -> None:
    ranks.run(2, _several_formats)


def _optimizer_formats() -> None:
    mesh, rank = mesh_of((2,)), dist.get_rank()
    precision = MixedPrecision(compute=BF16, main_gradients=BF16)
    sharded = shard(build(), mesh, placements_on(mesh, P, P), precision=precision)
    optimizer = torch.optim.AdamW(sharded.model.parameters(), lr=1e-2, fused=True)
    loss_of(sharded.model, batch(0, 0, rank)).backward()
    parameters = [p for p in sharded.model.parameters() if p.numel()]
    assert {p.grad.dtype for p in parameters if p.grad is not None} == {BF16}
    with pytest.raises(RuntimeError, match="scalar type"):
        optimizer.step()
    fully_shard_optimizer(optimizer)
    before = [p.detach().clone() for p in parameters]
    gradients = [p.grad for p in parameters]
    optimizer.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, parameters, strict=True))
    assert all(a is p.grad for a, p in zip(gradients, parameters, strict=True))
    assert {optimizer.state[p]["exp_avg"].dtype for p in parameters} == {torch.float32}
    with pytest.raises(ConfigError, match="closure"):
        optimizer.step(lambda: 0.0)


def test_gradients_of_another_format_need_the_adapter(ranks: RankPool) -> None:
    ranks.run(2, _optimizer_formats)


def _forgotten_adapter() -> None:
    mesh, rank = mesh_of((2,)), dist.get_rank()
    sharded = shard(build(), mesh, placements_on(mesh, O, O))
    optimizer = torch.optim.SGD(sharded.model.parameters(), lr=0.1)
    loss_of(sharded.model, batch(0, 0, rank)).backward()
    optimizer.step()
    with pytest.raises(WorkError, match="fully_shard_optimizer"):
        loss_of(sharded.model, batch(1, 0, rank))
    late = torch.optim.SGD(build().parameters(), lr=0.1)
    fully_shard_optimizer(late)  # of a model that was not sharded: nothing to do
    late.step()


def test_a_forgotten_adapter_is_noticed(ranks: RankPool) -> None:
    ranks.run(2, _forgotten_adapter)


@pytest.mark.parametrize("field", ["main_weights", "main_gradients", "reduce", "compute"])
def test_unsupported_formats_are_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=f"precision.{field}"):
        MixedPrecision(**{field: torch.float64})


def test_the_gap_of_accumulating_in_the_compute_format_would_show() -> None:
    """What ``test_accumulation_does_not_drift`` guards against is larger than its bound."""
    total = torch.zeros((), dtype=BF16)
    for _ in range(64):
        total += 0.01
    assert not math.isclose(total.item(), 0.64, rel_tol=1e-3)
