"""Attention to a part of the keys, and its gradients: what a softmax over all keys is made of.

The outputs over disjoint parts of the keys, weighted by the shares that their log-sum-exps have in
that of all keys, add up to the output over all of them. Given the output and the log-sum-exp of the
whole, the gradients of each part can be computed from that part alone, and add up as well. Source:
Dao, "FlashAttention-2", https://arxiv.org/abs/2307.08691, section 3.1.

All tensors are ``[B, heads, tokens, D]`` or views like it; the number of key and value heads
divides that of query heads. CPUs run torch's fused kernel, other devices plain matrix products in
fp32, a block of queries at a time.
"""

from __future__ import annotations

import math

import torch

SCORE_BYTES = 2**28
"""Most scores that plain products hold at a time, unless a single query's take more."""


def partial_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: bool = False,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output ``[B, heads, Q, D]`` and the log-sum-exp ``[B, heads, Q]`` of the scores.

    ``causal`` lets query i see the keys up to i, of equally many; ``mask`` ``[Q, N]`` in the
    query's dtype is added to the scores; at most one of the two. Every query sees some key. The
    output has the query's dtype, the log-sum-exp at least fp32.
    """
    if query.device.type == "cpu":
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        output, normalizer = kernel(query, key, value, 0.0, causal, attn_mask=mask)
        return output, normalizer
    return plain_partial_attention(query, key, value, causal=causal, mask=mask)


def plain_partial_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: bool,
    mask: torch.Tensor | None,
    score_bytes: int = SCORE_BYTES,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same on any device, with ``score_bytes`` of scores at a time."""
    outputs, normalizers = [], []
    for rows in _blocks(query, key, score_bytes):
        scores = _scores(query, key, rows, causal, mask)
        normalizer = scores.logsumexp(dim=-1, keepdim=True)
        outputs.append((scores - normalizer).exp() @ _wide(value).unsqueeze(2))
        normalizers.append(normalizer.squeeze(-1))
    output = torch.cat(outputs, dim=3).flatten(1, 2).to(query.dtype)
    return output, torch.cat(normalizers, dim=3).flatten(1, 2)


def partial_attention_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    normalizer: torch.Tensor,
    *,
    causal: bool = False,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a part of the keys adds to the gradients of query, key and value.

    ``output`` and ``normalizer`` are those over all keys, ``gradient`` is that of the output.
    """
    if query.device.type == "cpu":
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        tensors = (gradient, query, key, value, output, normalizer)
        into_query, into_key, into_value = kernel(*tensors, 0.0, causal, attn_mask=mask)
        return into_query, into_key, into_value
    return plain_partial_attention_backward(
        gradient, query, key, value, output, normalizer, causal=causal, mask=mask
    )


def plain_partial_attention_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    normalizer: torch.Tensor,
    *,
    causal: bool,
    mask: torch.Tensor | None,
    score_bytes: int = SCORE_BYTES,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same on any device, with ``score_bytes`` of scores at a time."""
    scale, groups = 1 / math.sqrt(query.shape[3]), key.shape[1]
    keys, values = _wide(key).unsqueeze(2), _wide(value).unsqueeze(2)
    into_key, into_value = torch.zeros_like(_wide(key)), torch.zeros_like(_wide(value))
    into_query = []
    for rows in _blocks(query, key, score_bytes):
        queries, gradients, outputs = (
            _wide(x[:, :, rows]).unflatten(1, (groups, -1)) for x in (query, gradient, output)
        )
        norms = normalizer[:, :, rows].unflatten(1, (groups, -1)).unsqueeze(-1)
        shares = (_scores(query, key, rows, causal, mask) - norms).exp()
        delta = (gradients * outputs).sum(dim=-1, keepdim=True)
        inner = shares * (gradients @ values.transpose(3, 4) - delta) * scale
        into_query.append(inner @ keys)
        into_key += (inner.transpose(3, 4) @ queries).sum(dim=2)
        into_value += (shares.transpose(3, 4) @ gradients).sum(dim=2)
    return torch.cat(into_query, dim=3).flatten(1, 2), into_key, into_value


def _blocks(query: torch.Tensor, key: torch.Tensor, score_bytes: int) -> list[slice]:
    """Runs of queries whose scores take about ``score_bytes``."""
    sequences, heads, length, _ = query.shape
    step = max(score_bytes // (4 * sequences * heads * key.shape[2]), 1)
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


def _scores(
    query: torch.Tensor,
    key: torch.Tensor,
    rows: slice,
    causal: bool,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """Scores of a block of queries, ``[B, key heads, heads of each, rows, N]``."""
    queries = _wide(query[:, :, rows]).unflatten(1, (key.shape[1], -1)) / math.sqrt(query.shape[3])
    scores: torch.Tensor = queries @ _wide(key).unsqueeze(2).transpose(3, 4)
    if causal:
        places = torch.arange(key.shape[2], device=query.device)
        scores = scores.masked_fill(places > places[rows].unsqueeze(1), -math.inf)
    if mask is not None:
        scores = scores + mask[rows]
    return scores


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """In fp32 at least."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
