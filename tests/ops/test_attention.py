"""Attention against a plain softmax with a full mask."""

from __future__ import annotations

import math

import pytest
import torch

from shoal import ops

BATCH, LENGTH, HEADS, KEY_HEADS, WIDTH = 2, 300, 6, 2, 10


def plain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: torch.Tensor | None,
    window: int | None,
) -> torch.Tensor:
    """Every token against every token, with everything unseen masked."""
    place = torch.arange(query.shape[1])
    seen = place[:, None] >= place[None, :]
    if window is not None:
        seen = seen & (place[:, None] - place[None, :] < window)
    seen = seen.expand(query.shape[0], 1, -1, -1)
    if documents is not None:
        seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
    key, value = (x.repeat_interleave(HEADS // KEY_HEADS, dim=2) for x in (key, value))
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    scores = (query @ key.transpose(2, 3) / math.sqrt(WIDTH)).masked_fill(~seen, -math.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    heads = (HEADS, KEY_HEADS, KEY_HEADS)
    query, key, value = (torch.randn(BATCH, LENGTH, n, WIDTH, requires_grad=True) for n in heads)
    return query, key, value


def numbered(*lengths: list[int]) -> torch.Tensor:
    rows = [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths]
    return torch.stack(rows)


@pytest.mark.parametrize("window", [None, 1, 7, 150, 299, 300, 1000])
@pytest.mark.parametrize("packed", [False, True])
def test_equals_masked_softmax(packed: bool, window: int | None) -> None:
    documents = numbered([1, 2, 250, 47], [300]) if packed else None
    spans = None if documents is None else ops.DocumentSpans.of(documents)
    ours, theirs = inputs(), inputs()
    result = ops.attend(*ours, spans=spans, window=window)
    expected = plain(*theirs, documents, window)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    direction = torch.randn_like(result)
    (result * direction).sum().backward()
    (expected * direction).sum().backward()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-5, atol=1e-5)


def test_single_documents_need_no_spans() -> None:
    assert ops.DocumentSpans.of(torch.tensor([[4, 4, 4], [9, 9, 9]])) is None


def test_spans_follow_runs_even_where_a_number_returns() -> None:
    spans = ops.DocumentSpans.of(torch.tensor([[1, 0, 1, 1], [2, 2, 2, 2]]))
    assert spans is not None
    assert spans.spans == ((0, 0, 1), (0, 1, 2), (0, 2, 4), (1, 0, 4))


def test_dropout_drops_whole_weights_and_keeps_the_mean() -> None:
    query = torch.zeros(1, 2000, 1, 2)
    value = torch.ones(1, 2000, 1, 2)
    torch.manual_seed(0)
    result = ops.attend(query, query, value, dropout=0.25)
    assert set(result[0, 0, 0].tolist()) <= {0.0, 1 / 0.75}  # the first token sees one weight
    assert abs(result.mean().item() - 1) < 0.02
    assert not torch.equal(result, ops.attend(query, query, value, dropout=0.25))
