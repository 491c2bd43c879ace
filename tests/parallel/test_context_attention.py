"""Attention over cut sequences against a plain softmax in fp64, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from shoal.fsdp import communicator_for
from shoal.ops import DocumentSpans
from shoal.parallel.context import ContextParallel, ExchangeKind
from tests.ranks import RankPool

HEADS, KEY_HEADS, WIDTH, BATCH = 6, 2, 10, 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    length: int
    documents: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """Lengths of the documents of both sequences."""
    window: int | None = None


CASES = {
    "257 tokens": Case(length=257),
    "one token more than the chunks": Case(length=17),
    "as many tokens as chunks": Case(length=8),
    "a narrow window": Case(length=257, window=7),
    "a window of one": Case(length=65, window=1),
    "a window over several chunks": Case(length=300, window=150),
    "packed": Case(length=65, documents=((1, 2, 40, 22), (65,))),
    "packed in a window": Case(length=257, documents=((100, 1, 156), (3, 250, 4)), window=30),
}


def tensors(case: Case, dtype: torch.dtype) -> list[torch.Tensor]:
    """Query, key, value and the gradient of the output."""
    generator = torch.Generator().manual_seed(case.length)
    return [
        torch.randn(BATCH, case.length, heads, WIDTH, generator=generator, dtype=torch.float64)
        .to(dtype)
        .requires_grad_()
        for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)
    ]


def documents_of(case: Case) -> torch.Tensor | None:
    if case.documents is None:
        return None
    rows = [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in case.documents]
    return torch.stack(rows)


def plain(case: Case, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Output and gradients of query, key and value, every token against every token."""
    query, key, value, direction = (x.double() for x in tensors(case, dtype))
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    place = torch.arange(case.length)
    seen = place[:, None] >= place[None, :]
    if case.window is not None:
        seen = seen & (place[:, None] - place[None, :] < case.window)
    seen = seen.expand(BATCH, 1, -1, -1)
    documents = documents_of(case)
    if documents is not None:
        seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
    by_head = [x.transpose(1, 2) for x in leaves]
    output = functional.scaled_dot_product_attention(
        by_head[0], by_head[1], by_head[2], attn_mask=seen, enable_gqa=True
    ).transpose(1, 2)
    output.backward(direction)
    return [output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def attend_everywhere(
    kind: ExchangeKind, cases: list[Case], dtype: torch.dtype
) -> list[list[torch.Tensor]]:
    """This rank's part of output and gradients, for each case on one live group."""
    world = dist.group.WORLD
    assert world is not None
    context = ContextParallel(communicator_for(world, torch.device("cpu")), kind)
    results = []
    for case in cases:
        parts = [context.take(x.detach()).requires_grad_() for x in tensors(case, dtype)]
        documents = documents_of(case)
        spans = None if documents is None else DocumentSpans.of(documents)
        attend = context.attention((BATCH, case.length), spans)
        output = attend(*parts[:3], window=case.window)
        output.backward(parts[3].detach())
        gradients = [part.grad for part in parts[:3] if part.grad is not None]
        results.append([output.detach(), *gradients])
    return results


def joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """The whole of what ranks took."""
    size, length = len(parts), sum(part.shape[1] for part in parts)
    short, longer = divmod(length, 2 * size)
    chunks: list[torch.Tensor] = []
    late: list[torch.Tensor] = []
    for rank, part in enumerate(parts):
        early = short + (rank < longer)
        chunks.append(part[:, :early])
        late.insert(0, part[:, early:])
    return torch.cat([*chunks, *late], dim=1)


def fitting(size: int) -> list[Case]:
    return [case for case in CASES.values() if case.length >= 2 * size]


@pytest.mark.parametrize("kind", ["gather", "ring"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_equals_a_plain_softmax_in_fp64(ranks: RankPool, size: int, kind: ExchangeKind) -> None:
    results = ranks.run(size, attend_everywhere, kind, fitting(size), torch.float64)
    for index, case in enumerate(fitting(size)):
        for parts, expected in zip(
            zip(*(result[index] for result in results), strict=True), plain(case), strict=True
        ):
            torch.testing.assert_close(joined(list(parts)), expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("kind", ["gather", "ring"])
def test_bf16_loses_what_one_rank_loses(ranks: RankPool, kind: ExchangeKind) -> None:
    case = CASES["packed in a window"]
    results = ranks.run(4, attend_everywhere, kind, [case], torch.bfloat16)
    alone = ranks.run(1, attend_everywhere, kind, [case], torch.bfloat16)[0][0]
    for index, expected in enumerate(plain(case, torch.bfloat16)):
        together = joined([result[0][index] for result in results]).double()
        error = (together - expected).norm() / expected.norm()
        error_alone = (alone[index].double() - expected).norm() / expected.norm()
        assert error < 0.005, (index, error)
        assert error < 1.5 * error_alone, (index, error, error_alone)


@pytest.mark.parametrize("kind", ["gather", "ring"])
def test_bits_are_the_same_each_time(ranks: RankPool, kind: ExchangeKind) -> None:
    cases = [CASES["packed in a window"], CASES["257 tokens"]]
    first = ranks.run(4, attend_everywhere, kind, cases, torch.float32)
    again = ranks.run(4, attend_everywhere, kind, cases, torch.float32)
    for one, other in zip(first, again, strict=True):
        for case_one, case_other in zip(one, other, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(case_one, case_other, strict=True))
