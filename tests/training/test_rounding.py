"""Stochastic rounding: unbiased, and the same draws wherever an element lies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shoal.errors import ConfigError
from shoal.fsdp import ShardedParameter
from shoal.plan import resolve_precision
from shoal.training import Nearest, Stochastic, build_optimizer
from tests.plan.configs import config
from tests.ranks import RankPool
from tests.training.layouts import at_every_layout

WIDTH = 11
NUM_DRAWS = 4000
BF16 = torch.bfloat16


def _parameter(rows: int, *, name: str = "a", start: int = 0, whole: int = 50) -> ShardedParameter:
    return ShardedParameter(
        names=(name,),
        shape=torch.Size((whole, WIDTH)),
        row_start=start,
        local=nn.Parameter(torch.zeros(rows, WIDTH, dtype=BF16)),
        primary=True,
    )


def _rounded(
    value: torch.Tensor, *, name: str = "a", start: int = 0, seed: int = 1, update: int = 1
) -> torch.Tensor:
    parameter = _parameter(len(value), name=name, start=start)
    rounding = Stochastic([parameter], seed)
    return rounding.rounded(parameter.local, value, torch.tensor(float(update)))


def _values(rows: int = 50) -> torch.Tensor:
    values = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(0))
    return values * 10.0 ** torch.arange(-5, 6)


def test_the_result_is_one_of_the_two_neighbours() -> None:
    values = _values()
    truncated = (values.view(torch.int32) & -0x10000).view(torch.float32)
    away = ((values.view(torch.int32) & -0x10000) + 0x10000).view(torch.float32)
    rounded = _rounded(values).float()
    assert ((rounded == truncated) | (rounded == away)).all()
    assert 0.3 < (rounded == away).float().mean() < 0.7


def test_what_bf16_holds_stays_and_so_does_what_is_not_finite() -> None:
    exact = _values().to(BF16)
    exact[0, :4] = torch.tensor([torch.inf, -torch.inf, 0.0, -0.0])
    assert torch.equal(_rounded(exact.float()).view(torch.int16), exact.view(torch.int16))
    nan = torch.full((1, WIDTH), torch.nan)
    nan.view(torch.int32)[0, 0] = 0x7FFFFFFF  # the one that a carry would turn into a zero
    assert _rounded(nan).isnan().all()


def test_the_average_is_the_value() -> None:
    values = _values(3)
    step = (2.0 ** (values.abs().log2().floor() - 7)).double()
    draws = torch.stack([_rounded(values, update=n).double() for n in range(NUM_DRAWS)])
    up = (values.double() / step).frac().abs()
    deviation = step * (up * (1 - up)).sqrt() / NUM_DRAWS**0.5
    error = (draws.mean(dim=0) - values).abs()
    assert (error <= 4.5 * deviation + 1e-12 * step).all()
    # Draws of neighbours, and of one update and the next, have nothing to do with each other.
    ups = (draws != draws.min(dim=0).values).double()
    ups = (ups - ups.mean(dim=0)).flatten(1)
    ups = ups / ups.norm(dim=0).clamp(min=1e-9)
    pairs = (ups.t() @ ups).fill_diagonal_(0)
    assert pairs.abs().max() < 5 / NUM_DRAWS**0.5
    assert (ups[1:] * ups[:-1]).sum(dim=0).abs().max() < 5 / NUM_DRAWS**0.5


def test_draws_follow_the_element_and_not_the_cut() -> None:
    values = _values()
    whole = _rounded(values)
    for start, stop in ((0, 1), (1, 18), (18, 18), (18, 50)):
        assert torch.equal(_rounded(values[start:stop], start=start), whole[start:stop])
    for other in (
        _rounded(values, name="b"),
        _rounded(values, seed=2),
        _rounded(values, update=2),
        _rounded(values, start=50),
    ):
        assert 0.3 < (other == whole).float().mean() < 0.9


def _sum_of_small_updates(rounding: str, kind: str) -> float:
    settings = config(
        optimizer={"kind": kind, "lr": 1e-4},
        precision={"compute": "fp32", "main_weights": "bf16", "rounding": rounding},
    )
    parameter = _parameter(50)
    optimizer = build_optimizer(
        settings.optimizer, [parameter], resolve_precision(settings), seed=3
    )
    with torch.no_grad():
        parameter.local.fill_(1.0)
    for _ in range(300):
        parameter.local.grad = torch.full((50, WIDTH), -1.0, dtype=BF16)
        optimizer.step()
    return parameter.local.float().mean().item()


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_small_updates_are_lost_or_kept(kind: str) -> None:
    # Steps of 1e-4 at 1.0, where bf16's are 2^-7.
    assert _sum_of_small_updates("nearest", kind) == 1.0
    assert _sum_of_small_updates("stochastic", kind) == pytest.approx(1.03, abs=0.002)


@pytest.mark.parametrize(
    "optimizer", [{"kind": "adamw"}, {"kind": "sgd", "momentum": 0.9}], ids=str
)
def test_every_layout_makes_the_same_bits(
    tmp_path: Path, ranks: RankPool, optimizer: dict[str, Any]
) -> None:
    precision = {"compute": "fp32", "main_weights": "bf16", "rounding": "stochastic"}
    found = at_every_layout(tmp_path, ranks, 3, precision=precision, optimizer=optimizer)
    expected = found.pop("one rank")
    assert expected["model.embed_tokens.weight"]["weight"].dtype == BF16
    for layout, states in found.items():
        assert states.keys() == expected.keys()
        for name, state in states.items():
            for key, value in state.items():
                assert torch.equal(value, expected[name][key]), (layout, name, key)


def test_fp32_is_not_rounded() -> None:
    parameter = _parameter(2)
    wide = nn.Parameter(torch.zeros(2, WIDTH))
    value = torch.randn(2, WIDTH)
    assert Nearest().rounded(wide, value, torch.tensor(1.0)) is value
    assert torch.equal(Nearest().rounded(parameter.local, value, torch.tensor(1.0)), value.to(BF16))
    with pytest.raises(ConfigError, match=r"precision\.rounding = 'stochastic'.*not rounded"):
        config(precision={"rounding": "stochastic"})
