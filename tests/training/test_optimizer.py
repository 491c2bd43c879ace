"""AdamW with moments of their own dtype, and the grouping of parameters."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from shoal.config import OptimizerSettings
from shoal.fsdp.sharded import ShardedParameter
from shoal.plan import Precision, resolve_precision
from shoal.training import SGD, AdamW, Moments, build_optimizer
from tests.plan.configs import config

SETTINGS = OptimizerSettings(lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)


def _precision(**formats: str) -> Precision:
    return resolve_precision(config(precision={"compute": "fp32", **formats}))


def _sharded(name: str, whole: tuple[int, ...], local: torch.Tensor) -> ShardedParameter:
    return ShardedParameter(
        names=(name,),
        shape=torch.Size(whole),
        row_start=0,
        local=nn.Parameter(local),
        primary=True,
    )


def _weights() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(5, 7), (0, 7), (11,), (1, 1)]
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def _run(optimizer: torch.optim.Optimizer, weights: list[nn.Parameter], steps: int) -> None:
    generator = torch.Generator().manual_seed(4)
    for _ in range(steps):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator).to(weight.dtype)
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fp32_moments_equal_torch(dtype: torch.dtype) -> None:
    ours = [nn.Parameter(weight.to(torch.float32)) for weight in _weights()]
    theirs = [nn.Parameter(weight.to(dtype)) for weight in _weights()]
    options = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    _run(AdamW(ours, moments=Moments(torch.float32), **options), ours, 7)  # type: ignore[arg-type]
    _run(torch.optim.AdamW(theirs, **options), theirs, 7)  # type: ignore[arg-type]
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our.double(), their.double(), rtol=2e-6, atol=1e-7)


def test_bf16_moments_stay_near_torch_and_take_half_the_memory() -> None:
    ours, theirs = _weights(), _weights()
    optimizer = AdamW(
        ours,
        lr=0.01,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.1,
        moments=Moments(torch.bfloat16),
    )
    _run(optimizer, ours, 7)
    _run(torch.optim.AdamW(theirs, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1), theirs, 7)
    for our, their in zip(ours, theirs, strict=True):
        # Seven updates of at most about 0.01 each, moments rounded to 8 bits.
        torch.testing.assert_close(our, their, rtol=0, atol=7 * 0.01 * 2**-6)
        assert optimizer.state[our]["exp_avg"].dtype == torch.bfloat16
        assert optimizer.state[our]["exp_avg_sq"].dtype == torch.bfloat16


def test_a_bf16_weight_with_fp32_moments_keeps_them() -> None:
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = AdamW(
        [weight],
        lr=0.5,
        betas=(0.9, 0.95),
        eps=0.0,
        weight_decay=0.0,
        moments=Moments(torch.float32),
    )
    weight.grad = torch.full_like(weight, 2.0)
    optimizer.step()
    assert weight.tolist() == [0.5] * 4
    torch.testing.assert_close(optimizer.state[weight]["exp_avg_sq"], torch.full((4,), 0.2))


def test_reloaded_state_goes_on_bit_for_bit() -> None:
    straight, resumed = _weights(), _weights()
    options = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    first = AdamW(straight, moments=Moments(torch.bfloat16), **options)  # type: ignore[arg-type]
    _run(first, straight, 3)
    state = copy.deepcopy(first.state_dict())
    with torch.no_grad():
        for target, source in zip(resumed, straight, strict=True):
            target.copy_(source)
    _run(first, straight, 2)
    second = AdamW(resumed, moments=Moments(torch.bfloat16), **options)  # type: ignore[arg-type]
    second.load_state_dict(state)
    _run(second, resumed, 2)
    for one, other in zip(straight, resumed, strict=True):
        assert torch.equal(one, other)


def test_decay_goes_by_the_whole_parameters_shape() -> None:
    matrix = _sharded("a.weight", (4, 3), torch.zeros(0, 3))
    vector = _sharded("a.bias", (4,), torch.zeros(2))
    optimizer = build_optimizer(SETTINGS, [matrix, vector], _precision(), seed=0)
    assert isinstance(optimizer, torch.optim.AdamW)
    decay = {
        id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]
    }
    assert decay == {id(matrix.local): 0.1, id(vector.local): 0.0}


@pytest.mark.parametrize(
    "formats",
    [{"moments": "bf16"}, {"main_weights": "bf16", "moments": "bf16", "rounding": "stochastic"}],
    ids=str,
)
def test_what_torch_cannot_do_chooses_our_own_kernel(formats: dict[str, str]) -> None:
    matrix = _sharded("a.weight", (4, 3), torch.zeros(4, 3))
    optimizer = build_optimizer(SETTINGS, [matrix], _precision(**formats), seed=0)
    assert isinstance(optimizer, AdamW)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_equals_torch(momentum: float) -> None:
    ours, theirs = _weights(), _weights()
    _run(SGD(ours, lr=0.1, momentum=momentum), ours, 5)
    _run(torch.optim.SGD(theirs, lr=0.1, momentum=momentum), theirs, 5)
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=1e-6, atol=1e-7)


def test_sgd_decays_apart_from_its_momentum() -> None:
    weight = nn.Parameter(torch.ones(1, 1))
    optimizer = SGD([weight], lr=0.5, momentum=0.5, weight_decay=0.1)
    for gradient, expected in ((2.0, 0.95 - 1.0), (0.0, -0.05 * 0.95 - 0.5)):
        weight.grad = torch.full((1, 1), gradient)
        optimizer.step()
        assert weight.item() == pytest.approx(expected)
