"""Attention to parts of the keys: both ways of computing it, and how parts make a whole."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from shoal.ops.partial_attention import (
    partial_attention,
    partial_attention_backward,
    plain_partial_attention,
    plain_partial_attention_backward,
)

BATCH, HEADS, KEY_HEADS, WIDTH = 2, 6, 2, 10


def tensors(
    num_queries: int, num_keys: int, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key, value and the gradient of the output, ``[B, heads, tokens, D]``."""
    torch.manual_seed(num_queries)
    sizes = ((HEADS, num_queries), (KEY_HEADS, num_keys), (KEY_HEADS, num_keys))
    query, key, value, gradient = (
        torch.randn(BATCH, tokens, heads, WIDTH, dtype=torch.float64).to(dtype).transpose(1, 2)
        for heads, tokens in (*sizes, sizes[0])
    )
    return query, key, value, gradient


def band(num_queries: int, num_keys: int) -> torch.Tensor:
    """A mask to add, under which each query sees two keys."""
    seen = torch.zeros(num_queries, num_keys, dtype=torch.bool)
    for query in range(num_queries):
        seen[query, [query % num_keys, (query + 1) % num_keys]] = True
    return torch.zeros(num_queries, num_keys, dtype=torch.float64).masked_fill(~seen, -math.inf)


SIGHTS = ["all", "causal", "mask"]


@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize("score_bytes", [1, 4 * BATCH * HEADS * 40 * 7, 2**28])
def test_plain_products_equal_the_fused_kernel_and_torch(sight: str, score_bytes: int) -> None:
    num_keys = 40 if sight == "causal" else 23
    query, key, value, gradient = tensors(40, num_keys)
    mask = band(40, num_keys) if sight == "mask" else None
    causal = sight == "causal"
    fused = partial_attention(query, key, value, causal=causal, mask=mask)
    plain = plain_partial_attention(
        query, key, value, causal=causal, mask=mask, score_bytes=score_bytes
    )
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    expected = functional.scaled_dot_product_attention(
        leaves[0], leaves[1], leaves[2], attn_mask=mask, is_causal=causal, enable_gqa=True
    )
    expected.backward(gradient)
    for output, normalizer in (fused, plain):
        torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(normalizer, fused[1], rtol=1e-12, atol=1e-12)
    rest = (gradient, query, key, value, *fused)
    both = (
        partial_attention_backward(*rest, causal=causal, mask=mask),
        plain_partial_attention_backward(*rest, causal=causal, mask=mask, score_bytes=score_bytes),
    )
    for gradients in both:
        for made, leaf in zip(gradients, leaves, strict=True):
            torch.testing.assert_close(made, leaf.grad, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_inputs_are_summed_wide(dtype: torch.dtype) -> None:
    query, key, value, _ = tensors(33, 50, dtype)
    exact, normalizer = partial_attention(*(x.double() for x in (query, key, value)))
    for output, norm in (
        partial_attention(query, key, value),
        plain_partial_attention(query, key, value, causal=False, mask=None),
    ):
        assert output.dtype is dtype and norm.dtype is torch.float32
        error = (output.double() - exact).norm() / exact.norm()
        assert error < (1e-6 if dtype is torch.float32 else 4e-3)
        torch.testing.assert_close(norm.double(), normalizer, rtol=1e-4, atol=1e-4)


def test_parts_make_the_whole() -> None:
    query, key, value, gradient = tensors(20, 30)
    output, normalizer = partial_attention(query, key, value)
    gradients = partial_attention_backward(gradient, query, key, value, output, normalizer)
    into_query = torch.zeros_like(query)
    sum_of_parts = torch.zeros_like(output)
    for part in (slice(0, 1), slice(1, 18), slice(18, 30)):
        keys, values = key[:, :, part], value[:, :, part]
        piece, norm = partial_attention(query, keys, values)
        sum_of_parts += (norm - normalizer).exp().unsqueeze(-1) * piece
        added = partial_attention_backward(gradient, query, keys, values, output, normalizer)
        into_query += added[0]
        torch.testing.assert_close(added[1], gradients[1][:, :, part], rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(added[2], gradients[2][:, :, part], rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(sum_of_parts, output, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(into_query, gradients[0], rtol=1e-11, atol=1e-12)
