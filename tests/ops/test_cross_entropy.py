"""The chunked loss against torch's own on whole logits."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from shoal import ops

ROWS, HIDDEN, VOCABULARY = 37, 66, 257


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(4)
    hidden = torch.randn(ROWS, HIDDEN).to(dtype).requires_grad_()
    weight = (torch.randn(VOCABULARY, HIDDEN) * 0.3).to(dtype).requires_grad_()
    labels = torch.randint(0, VOCABULARY, (ROWS,))
    labels[::5] = -100
    return hidden, weight, labels


def reference(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(
        hidden.double() @ weight.double().t(), labels, reduction="sum", ignore_index=-100
    )


@pytest.mark.parametrize("chunk_rows", [1, 8, 37, 100, None])
def test_equals_whole_logits(chunk_rows: int | None) -> None:
    hidden, weight, labels = inputs()
    loss = ops.linear_cross_entropy(hidden, weight, labels, chunk_rows=chunk_rows)
    (loss / 7).backward()
    other_hidden, other_weight, _ = inputs()
    expected = reference(other_hidden, other_weight, labels)
    (expected / 7).backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(hidden.grad, other_hidden.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(weight.grad, other_weight.grad, rtol=1e-5, atol=1e-6)


def test_bf16_stays_within_its_rounding() -> None:
    hidden, weight, labels = inputs(torch.bfloat16)
    loss = ops.linear_cross_entropy(hidden, weight, labels, chunk_rows=8)
    loss.backward()
    other_hidden, other_weight, _ = inputs(torch.bfloat16)
    expected = reference(other_hidden, other_weight, labels)
    expected.backward()
    assert weight.grad is not None and other_weight.grad is not None
    assert weight.grad.dtype == torch.bfloat16
    torch.testing.assert_close(loss.double(), expected, rtol=2e-3, atol=0)
    error = (weight.grad.double() - other_weight.grad.double()).norm()
    assert error < 0.01 * other_weight.grad.double().norm()


def test_only_ignored_labels_give_zero_and_zero_gradients() -> None:
    hidden, weight, labels = inputs()
    loss = ops.linear_cross_entropy(hidden, weight, torch.full_like(labels, -100))
    loss.backward()
    assert loss.item() == 0
    assert hidden.grad is not None and not hidden.grad.any()
    assert weight.grad is not None and not weight.grad.any()


def test_frozen_head_and_no_grad() -> None:
    hidden, weight, labels = inputs()
    frozen = weight.detach()
    ops.linear_cross_entropy(hidden, frozen, labels, chunk_rows=9).backward()
    assert hidden.grad is not None and frozen.grad is None
    with torch.no_grad():
        loss = ops.linear_cross_entropy(hidden, weight, labels)
    assert not loss.requires_grad
    torch.testing.assert_close(loss.double(), reference(hidden, weight, labels).detach())


def test_a_second_backward_is_refused() -> None:
    hidden, weight, labels = inputs()
    loss = ops.linear_cross_entropy(hidden, weight, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward only"):
        loss.backward()


def test_whole_logits_are_never_held() -> None:
    """Peak memory of a large vocabulary, counted by the allocations of the forward pass."""
    torch.manual_seed(0)
    rows, vocabulary = 512, 20_000
    hidden = torch.randn(rows, 8, requires_grad=True)
    weight = torch.randn(vocabulary, 8, requires_grad=True)
    labels = torch.zeros(rows, dtype=torch.int64)
    with torch.profiler.profile(profile_memory=True) as profile:
        ops.linear_cross_entropy(hidden, weight, labels, chunk_rows=16)
    events = profile.events()
    assert events is not None
    largest = max(event.self_cpu_memory_usage for event in events)
    assert largest <= 4 * 2 * 16 * vocabulary  # a few chunks, of 32 that the logits would take
