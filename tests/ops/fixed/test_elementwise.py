"""Norms, rotation, activation, softmax and router: rows independent, close to fp64."""

from __future__ import annotations

import pytest
import torch

from shoal import ops
from shoal.errors import ConfigError
from shoal.ops.fixed import (
    KVCache,
    add_gated,
    add_rms_norm,
    clamped,
    log_normalizer,
    log_softmax,
    place_heads,
    rms_norm,
    rotate,
    route,
    swiglu,
    take_rows,
    widened,
)
from shoal.ops.fixed.probes import hard_rows
from tests.ops.fixed.company import assert_independent, same_bits

BF16, FP32 = torch.bfloat16, torch.float32
WIDTHS = [1, 16, 66, 515]


def close(result: torch.Tensor, exact: torch.Tensor) -> None:
    """Within the rounding of the result's dtype."""
    tolerance = 0.005 if result.dtype == BF16 else 2e-6
    torch.testing.assert_close(result.double(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm(width: int, dtype: torch.dtype) -> None:
    weight = torch.randn(width).to(dtype)
    rows = hard_rows(16, width, dtype)
    assert_independent(lambda chosen: rms_norm(rows[chosen], weight, 1e-6), 16)
    rows = torch.randn(3, 5, width).to(dtype)
    wide = rows.double()
    exact = wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    close(rms_norm(rows, weight, 1e-6), exact)


def test_add_rms_norm_is_an_addition_and_a_norm() -> None:
    stream, added, weight = torch.randn(5, 66), torch.randn(5, 66).bfloat16(), torch.randn(66)
    sums, normalized = add_rms_norm(stream, added, weight, 1e-5)
    assert same_bits(sums, stream + added)
    assert same_bits(normalized, rms_norm(sums, weight, 1e-5, dtype=BF16))
    stream = stream.bfloat16()
    sums, normalized = add_rms_norm(stream, added, weight, 1e-5)
    assert same_bits(sums, stream + added)
    assert same_bits(normalized, rms_norm(sums, weight, 1e-5))


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("half", [1, 8, 17, 64])
def test_rotate(half: int, dtype: torch.dtype) -> None:
    heads = hard_rows(16, 3 * 2 * half, dtype).view(16, 3, 2 * half)
    angle = torch.randn(16, half)
    cosine, sine = angle.cos().to(dtype), angle.sin().to(dtype)

    def compute(chosen: torch.Tensor) -> torch.Tensor:
        query, key = heads[chosen].split((2, 1), dim=1)
        return torch.cat(rotate(query, key, cosine[chosen], sine[chosen]), dim=1)

    assert_independent(compute, 16)
    heads = torch.randn(16, 3, 2 * half).to(dtype)
    exact = ops.rotate(heads.double()[None], cosine.double()[None], sine.double()[None])[0]
    close(compute(torch.arange(16)), exact)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("width", WIDTHS)
def test_swiglu(width: int, dtype: torch.dtype) -> None:
    both = hard_rows(16, 2 * width, dtype)

    def compute(chosen: torch.Tensor) -> torch.Tensor:
        gate, up = both[chosen].chunk(2, dim=1)
        return swiglu(gate, up)

    assert_independent(compute, 16)
    gate, up = torch.linspace(-120, 120, 1001).to(dtype), torch.randn(1001).to(dtype)
    exact = torch.nn.functional.silu(gate.double()) * up.double()
    close(swiglu(gate, up), exact)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("width", WIDTHS)
def test_add_gated(width: int, dtype: torch.dtype) -> None:
    output, shared = hard_rows(16, width, dtype), hard_rows(16, width, dtype, salt=8)
    scores = hard_rows(16, 1, FP32, salt=9)
    assert_independent(lambda chosen: add_gated(output[chosen], shared[chosen], scores[chosen]), 16)
    output, shared = torch.randn(9, width).to(dtype), torch.randn(9, width).to(dtype)
    scores = torch.tensor([-120.0, -30, -3, -0.1, 0, 0.1, 3, 30, 120]).unsqueeze(1)
    exact = output.double() + scores.double().sigmoid() * shared.double()
    close(add_gated(output, shared, scores), exact)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("width", WIDTHS)
def test_rows_are_taken_widened_and_clamped_as_torch_does(width: int, dtype: torch.dtype) -> None:
    table = hard_rows(16, width, dtype)
    index = torch.tensor([3, 0, 15, 3])
    assert same_bits(take_rows(table, index), table[index].float())
    assert same_bits(take_rows(table, index.int()), table[index].float())
    assert same_bits(widened(table[:, : width // 2 + 1]), table[:, : width // 2 + 1].float())
    table[1, 0] = -0.0
    assert same_bits(clamped(table, 0.75), table.clamp(-0.75, 0.75))


@pytest.mark.parametrize("width", [1, 17, 1024, 3001])
def test_log_softmax(width: int) -> None:
    rows = hard_rows(16, width, FP32)
    result = assert_independent(lambda chosen: log_softmax(rows[chosen]), 16)
    normalizer = log_normalizer(rows)
    assert same_bits(rows - normalizer.unsqueeze(1), result)
    logits = torch.randn(9, width) * torch.tensor([0.0, 0.1, 1, 5, 10, 20, 30, 50, 80])[:, None]
    exact = logits.double().log_softmax(dim=-1)
    torch.testing.assert_close(log_softmax(logits).double(), exact, rtol=1e-6, atol=2e-5)


def test_log_softmax_with_forbidden_tokens() -> None:
    logits = torch.randn(3, 100)
    logits[:, 7:90] = -torch.inf
    exact = logits.double().log_softmax(dim=-1)
    torch.testing.assert_close(log_softmax(logits).double(), exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("experts", "per_token"), [(1, 1), (8, 2), (37, 5), (160, 8)])
def test_route(experts: int, per_token: int) -> None:
    scores = hard_rows(16, experts, FP32)

    def compute(chosen: torch.Tensor) -> torch.Tensor:
        choices, weights = route(scores[chosen], per_token, normalize=True)
        return torch.cat((choices.float(), weights), dim=1)

    assert_independent(compute, 16)
    scores = torch.randn(40, experts)
    probabilities = scores.double().softmax(dim=-1)
    expected = probabilities.topk(per_token, dim=-1).indices.sort(dim=-1).values
    choices, weights = route(scores, per_token, normalize=False)
    assert torch.equal(choices, expected)
    close(weights, probabilities.gather(1, expected))
    _, weights = route(scores, per_token, normalize=True)
    close(weights.sum(dim=1), torch.ones(40, dtype=torch.float64))


def test_the_lower_expert_wins_a_tie() -> None:
    choices, weights = route(torch.zeros(1, 9), 4, normalize=False)
    assert choices.tolist() == [[0, 1, 2, 3]]
    close(weights, torch.full((1, 4), 1 / 9, dtype=torch.float64))
    scores = torch.tensor([[1.0, 3.0, 2.0, 2.0, 3.0, 2.0]])
    assert route(scores, 3, normalize=False)[0].tolist() == [[1, 2, 4]]


def test_impossible_scores_still_choose_distinct_experts() -> None:
    for bad in (float("nan"), float("inf"), -float("inf")):
        scores = torch.full((1, 9), bad)
        assert route(scores, 3, normalize=True)[0].tolist() == [[0, 1, 2]]
    with pytest.raises(ConfigError, match=r"there are 9 experts"):
        route(torch.zeros(1, 9), 10, normalize=True)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize(("heads", "kv_heads", "half"), [(4, 2, 8), (3, 1, 33), (2, 2, 5)])
@pytest.mark.parametrize("normalizes", [False, True])
def test_place_heads_is_norm_rotation_and_cache(
    normalizes: bool, heads: int, kv_heads: int, half: int, dtype: torch.dtype
) -> None:
    width = 2 * half
    fused = hard_rows(16, (heads + 2 * kv_heads) * width, dtype)
    query, key, value = fused.split([heads * width, kv_heads * width, kv_heads * width], dim=1)
    angle = torch.randn(16, half)
    cosine, sine = angle.cos(), angle.sin()
    slots = torch.arange(16) * 3
    slots[5] = -1
    norms = torch.rand(width).to(dtype), torch.rand(width).to(dtype)
    ours, theirs = (KVCache(4, 16, 2, kv_heads, width, dtype) for _ in range(2))
    found = place_heads(
        query, key, value, cosine, sine, ours, 1, slots, norms if normalizes else None, 1e-6
    )
    query, key, value = (x.unflatten(1, (-1, width)) for x in (query, key, value))
    if normalizes:
        query, key = rms_norm(query, norms[0], 1e-6), rms_norm(key, norms[1], 1e-6)
    query, key = rotate(query, key, cosine, sine)
    theirs.write(1, key, value, slots)
    assert same_bits(found, query)
    assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)
