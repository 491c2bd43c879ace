"""The sampler against the logits processors of ``transformers``, and rows against their company."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from shoal.inference import SamplingParams
from shoal.inference.sampler import Row, Sampled, Sampler
from shoal.inference.sampler.adjustments import adjusted
from shoal.inference.sampler.filters import kept
from shoal.ops.fixed.softmax import log_softmax
from shoal.ops.on_threads import on_threads

VOCAB = 257


def _row(generated: tuple[int, ...] = (), *, seed: int = 1, choice: int = 0, **params: Any) -> Row:
    return Row(
        params=SamplingParams(**params),
        seed=seed,
        choice=choice,
        prompt=(5, 6, 5),
        generated=generated,
    )


def _logits(rows: int, *, seed: int = 0, width: int = VOCAB, spread: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=generator) * spread


def _one(logits: torch.Tensor, row: Row, end_ids: tuple[int, ...] = ()) -> Sampled:
    return Sampler(logits.shape[-1], end_ids).sample(logits.reshape(1, -1), [row])[0]


def test_temperature_zero_takes_the_lowest_of_the_likeliest() -> None:
    logits = torch.zeros(VOCAB)
    logits[[40, 30, 200]] = 2.0
    for params in ({"temperature": 0.0}, {"temperature": 1e-9}, {"top_k": 1}, {"top_p": 0}):
        assert _one(logits, _row(**params)).token == 30


@pytest.mark.parametrize("spread", [0.2, 3.0, 20.0])
@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 1, "temperature": 0.5},
        {"top_k": 7},
        {"top_k": 300},
        {"top_p": 0.0},
        {"top_p": 0.0, "top_k": 7, "min_p": 1.0, "temperature": 2.0},
        {"top_p": 0.01},
        {"top_p": 0.5},
        {"top_p": 0.999},
        {"min_p": 0.01, "temperature": 2.0},
        {"min_p": 1.0},
        {"top_k": 20, "top_p": 0.7, "min_p": 0.05, "temperature": 1.3},
    ],
)
def test_filters_keep_what_those_of_transformers_keep(
    params: dict[str, float], spread: float
) -> None:
    warpers: list[LogitsProcessor] = [TemperatureLogitsWarper(params.get("temperature", 1.0))]
    if "top_k" in params:
        warpers.append(TopKLogitsWarper(int(params["top_k"])))
    if "top_p" in params:
        warpers.append(TopPLogitsWarper(params["top_p"]))
    if "min_p" in params:
        warpers.append(MinPLogitsWarper(params["min_p"]))
    for line in _logits(20, seed=int(spread), spread=spread):
        scores = line[None]
        for warper in warpers:
            scores = warper(torch.zeros(1, 0, dtype=torch.long), scores)
        expected = torch.isfinite(scores[0]).nonzero()[:, 0].tolist()
        ids = kept(line.numpy(), int(line.argmax()), SamplingParams(**params))  # type: ignore[arg-type]
        assert sorted(range(VOCAB) if ids is None else ids.tolist()) == expected


def test_of_equally_likely_tokens_the_lowest_are_kept() -> None:
    logits = np.zeros(VOCAB, dtype=np.float32)
    logits[100] = 1.0
    top_k = kept(logits, 100, SamplingParams(top_k=4))
    assert top_k is not None and top_k.tolist() == [100, 0, 1, 2]
    top_p = kept(logits, 100, SamplingParams(top_p=2 / 257))
    assert top_p is not None and top_p.tolist() == [100]


@pytest.mark.parametrize("params", [{}, {"top_k": 4}, {"min_p": 0.1}, {"temperature": 0.01}])
def test_no_probability_is_reached_by_the_lowest_of_the_likeliest(params: dict[str, Any]) -> None:
    logits = np.full(VOCAB, -np.inf, dtype=np.float32)
    logits[[40, 30, 200]] = 2.0
    logits[5] = 1.9
    ids = kept(logits, 30, SamplingParams(top_p=0, **params))
    assert ids is not None and ids.tolist() == [30]


def test_a_wide_nucleus_is_found_in_a_flat_row() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=20_000).astype(np.float32) * 0.01
    ids = kept(logits, int(logits.argmax()), SamplingParams(top_p=0.5))
    assert ids is not None
    weights = np.exp(logits.astype(np.float64))
    assert weights[ids].sum() >= 0.5 * weights.sum() > weights[ids[:-1]].sum()
    assert weights[ids].min() >= np.delete(weights, ids).max()


def test_only_kept_tokens_are_drawn_and_all_of_them() -> None:
    logits = _logits(1)[0]
    row = _row(top_k=5)
    ids = kept(logits.numpy(), int(logits.argmax()), row.params)
    assert ids is not None
    drawn = {_one(logits, replace(row, seed=seed)).token for seed in range(400)}
    assert drawn == set(ids.tolist())


def test_repetition_is_penalized_as_in_transformers() -> None:
    logits = _logits(1)
    row = _row((9, 9, 10), repetition_penalty=1.3)
    seen = torch.tensor([[*row.prompt, *row.generated]])
    expected = RepetitionPenaltyLogitsProcessor(1.3)(seen, logits.clone())
    torch.testing.assert_close(torch.from_numpy(adjusted(logits[0].numpy(), row, ())), expected[0])


def test_occurrences_in_the_answer_are_penalized_by_openais_formula() -> None:
    logits = _logits(1)[0].numpy()
    row = _row((9, 9, 10, 9), frequency_penalty=0.5, presence_penalty=-0.25, logit_bias=((9, 2.0),))
    difference = adjusted(logits, row, ()) - logits
    expected = np.zeros(VOCAB)
    expected[9], expected[10] = -3 * 0.5 + 0.25 + 2.0, -0.5 + 0.25
    np.testing.assert_allclose(difference, expected, atol=1e-6)


def test_a_bias_decides() -> None:
    logits = _logits(1)[0]
    least = int(logits.argmin())
    assert _one(logits, _row(logit_bias=((least, 100.0),))).token == least
    best = int(logits.argmax())
    assert _one(logits, _row(temperature=0, logit_bias=((best, -100.0),))).token != best


def test_no_end_before_min_tokens() -> None:
    logits = torch.zeros(VOCAB)
    logits[[3, 4, 5]] = torch.tensor([9.0, 8.0, 7.0])
    wishes: dict[str, Any] = {"temperature": 0, "min_tokens": 2, "stop_token_ids": (4,)}
    tokens = [
        _one(logits, _row(generated, **wishes), end_ids=(3,)).token
        for generated in ((), (1,), (1, 1))
    ]
    assert tokens == [5, 5, 3]
    assert _one(logits, _row(ignore_eos=True, **wishes), end_ids=(3,)).token == 3


def test_the_callers_logits_are_left_alone() -> None:
    logits = _logits(2)
    before = logits.clone()
    rows = [
        _row((9,), logit_bias=((1, 5.0),), repetition_penalty=2.0, min_tokens=3, logprobs=1)
    ] * 2
    Sampler(VOCAB, (3,)).sample(logits, rows)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("params", [{}, {"temperature": 0}, {"top_p": 0.5, "logprobs": 2}])
def test_a_row_without_numbers_gives_no_token_and_harms_no_other(
    number: float, params: dict[str, Any]
) -> None:
    logits = _logits(3)
    rows = [_row(seed=seed, **params) for seed in range(3)]
    alone = [_one(line, row) for line, row in zip(logits, rows, strict=True)]
    logits[1, 77] = number
    sampled = Sampler(VOCAB).sample(logits, rows)
    assert sampled[1] == Sampled(token=None, scored=None)
    assert [sampled[0], sampled[2]] == [alone[0], alone[2]]
    logits[1] = -float("inf")
    assert Sampler(VOCAB).sample(logits, rows)[1].token is None


def test_log_probabilities_are_of_the_unchanged_logits() -> None:
    logits = _logits(1)
    row = _row((9,), temperature=0.3, top_k=2, frequency_penalty=1.0, logprobs=3)
    sampled = _one(logits, row)
    expected = log_softmax(logits)[0]
    assert sampled.scored is not None and sampled.token == sampled.scored.token
    assert sampled.scored.logprob == expected[sampled.token].item()
    top = torch.topk(expected, 3)
    assert sampled.scored.top == tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))
    reference = torch.log_softmax(logits.double(), dim=1)[0, sampled.token].item()
    assert sampled.scored.logprob == pytest.approx(reference, abs=1e-6)
    assert _one(logits, _row()).scored is None
    assert _one(logits, _row(logprobs=0)).scored.top == ()  # type: ignore[union-attr]


def test_prompts_are_scored_row_by_row() -> None:
    logits = _logits(4)
    scored = Sampler(VOCAB).score(logits, [7, 8, 256, 0], 2)
    expected = log_softmax(logits)
    assert [each.logprob for each in scored] == [
        expected[row, token].item() for row, token in enumerate([7, 8, 256, 0])
    ]
    assert [each.top[0][0] for each in scored] == logits.argmax(dim=1).tolist()
    assert Sampler(VOCAB).score(logits[:0], [], 2) == []


KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"temperature": 0.7, "top_p": 0.9, "logprobs": 2},
    {"top_k": 9, "logprobs": 0},
    {"min_p": 0.02, "presence_penalty": 0.5},
    {"repetition_penalty": 1.2, "logit_bias": ((3, 4.0),)},
    {"min_tokens": 9, "frequency_penalty": 0.3, "logprobs": 5},
]


@pytest.mark.parametrize("width", [VOCAB, 5000])
def test_a_row_does_not_notice_its_company(width: int) -> None:
    count = 33
    logits = _logits(count, width=width)
    rows = [
        _row((number % 7, 9), seed=number % 5, choice=number % 3, **KINDS[number % len(KINDS)])
        for number in range(count)
    ]
    sampler = Sampler(width, (0,))
    alone = [_one(line, row, (0,)) for line, row in zip(logits, rows, strict=True)]
    order = list(range(count))
    for size in (1, 2, 3, 7, 8, 16, 17, 33):
        random.Random(size).shuffle(order)
        for start in range(0, count, size):
            batch = order[start : start + size]
            assert sampler.sample(logits[batch], [rows[at] for at in batch]) == [
                alone[at] for at in batch
            ]


def test_two_threads_give_what_one_gives() -> None:
    logits = _logits(8, width=70_000)
    rows = [_row(seed=number, **KINDS[number % len(KINDS)]) for number in range(8)]
    results = []
    for count in (1, 2):
        with on_threads(count):
            results.append(Sampler(70_000).sample(logits, rows))
    assert results[0] == results[1]


def test_equal_seeds_are_equal_and_choices_and_positions_differ() -> None:
    logits = _logits(1, width=5000, spread=0.1)[0]

    def token(**changes: Any) -> int | None:
        return _one(logits, _row(**changes)).token

    assert token(seed=1) == token(seed=1)
    assert len({token(seed=1), token(seed=2), token(seed=1, choice=1)}) == 3
    assert token(generated=(1,)) == token(generated=(2,)) != token()
