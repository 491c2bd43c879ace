"""Dispatch, grouped products and combination against a loop over experts."""

from __future__ import annotations

import torch

from shoal import ops

TOKENS, CHOICES, EXPERTS, HIDDEN, WIDTH = 19, 3, 7, 11, 5


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(6)
    tokens = torch.randn(TOKENS, HIDDEN, dtype=dtype, requires_grad=True)
    weight = torch.randn(EXPERTS * WIDTH, HIDDEN, dtype=dtype, requires_grad=True)
    shares = torch.rand(TOKENS, CHOICES, dtype=dtype, requires_grad=True)
    # Expert 2 is never chosen.
    scores = torch.randn(TOKENS, EXPERTS)
    scores[:, 2] = -9
    return tokens, weight, shares, scores.topk(CHOICES).indices.sort().values


def test_equals_a_loop_over_experts() -> None:
    tokens, weight, shares, choices = inputs(torch.float64)
    groups = ops.ExpertGroups.of(choices, EXPERTS)
    assert groups.sizes[2] == 0 and sum(groups.sizes) == TOKENS * CHOICES
    rows = ops.grouped_linear(ops.dispatch(tokens, groups), weight, groups.sizes)
    result = ops.combine(rows, shares, groups)

    tokens2, weight2, shares2, _ = inputs(torch.float64)
    expected = torch.zeros(TOKENS, WIDTH, dtype=torch.float64)
    for token in range(TOKENS):
        for place, expert in enumerate(choices[token].tolist()):
            matrix = weight2[expert * WIDTH : (expert + 1) * WIDTH]
            expected[token] += shares2[token, place] * (matrix @ tokens2[token])
    torch.testing.assert_close(result, expected)
    direction = torch.randn_like(result)
    (result * direction).sum().backward()
    (expected * direction).sum().backward()
    for ours, theirs in ((tokens, tokens2), (weight, weight2), (shares, shares2)):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_rows_lie_expert_by_expert_with_tokens_in_order() -> None:
    choices = torch.tensor([[0, 2], [1, 2], [0, 1]])
    groups = ops.ExpertGroups.of(choices, 4)
    tokens = torch.arange(3.0).unsqueeze(1)
    assert groups.sizes == (2, 2, 2, 0)
    assert ops.dispatch(tokens, groups).flatten().tolist() == [0, 2, 1, 2, 0, 1]


def test_no_gradient_where_none_is_needed() -> None:
    tokens, weight, _, choices = inputs(torch.float32)
    groups = ops.ExpertGroups.of(choices, EXPERTS)
    rows = ops.dispatch(tokens.detach(), groups)
    ops.grouped_linear(rows, weight, groups.sizes).sum().backward()
    assert tokens.grad is None and weight.grad is not None
