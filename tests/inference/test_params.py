"""What requests may say, and what is refused before anything is computed."""

from __future__ import annotations

import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch

from shoal.errors import ConfigError
from shoal.inference import Limits, Request, SamplingParams

NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("max_tokens", value) for value in (-1, 1.0, True, "1")),
        *(("min_tokens", value) for value in (-1, None)),
        *(("n", value) for value in (0, -1, None, True, 1.5)),
        *(("temperature", value) for value in (-0.1, NAN, INFINITY, 1e7, None, "1", True)),
        *(("top_k", value) for value in (-1, 1.0)),
        *(("top_p", value) for value in (-0.1, 1.1, NAN, -INFINITY)),
        *(("min_p", value) for value in (-0.1, 1.1, NAN)),
        *(("repetition_penalty", value) for value in (0.0, 1e-30, 101.0, -1.0, NAN, INFINITY)),
        *(("presence_penalty", value) for value in (-2.1, 2.1, NAN)),
        *(("frequency_penalty", value) for value in (-2.1, 2.1, NAN)),
        *(("seed", value) for value in (-1, 2**63, True, 1.0, "1")),
        *(("stop", value) for value in ("text", ["a"], ("",), (1,))),
        *(("stop_token_ids", value) for value in ([1], (-1,), (1.0,), (True,))),
        *(("logit_bias", value) for value in ({1: 1.0}, ((1,),), ((-1, 1.0),), ((True, 1.0),))),
        *(("logit_bias", ((1, value),)) for value in (101.0, NAN, INFINITY, "1")),
        ("logit_bias", ((1, 1.0), (1, 2.0))),
        ("ignore_eos", 1),
        *((name, value) for name in ("logprobs", "prompt_logprobs") for value in (-1, True, 1.0)),
        *(("priority", value) for value in (-101, 101, None, 0.5)),
    ],
)
def test_values_that_make_no_sense_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as refusal:
        SamplingParams(**{field: value})
    assert refusal.value.field == field


def test_the_borders_are_allowed() -> None:
    SamplingParams(top_p=0)
    SamplingParams(
        max_tokens=0,
        temperature=0,
        top_p=1,
        min_p=1,
        seed=2**63 - 1,
        logprobs=0,
        logit_bias=((0, 100), (1, -100)),
        stop=("\ud83d",),
        priority=-100,
    )


def test_min_tokens_cannot_be_more_than_max_tokens() -> None:
    with pytest.raises(ConfigError, match="no more than 2 tokens"):
        SamplingParams(min_tokens=3, max_tokens=2)


def test_a_seed_is_kept_and_a_missing_one_is_drawn_afresh() -> None:
    seeded = Request(id="a", prompt=(1,), params=SamplingParams(seed=7))
    assert seeded.seed == 7
    drawn = {Request(id="a", prompt=(1,)).seed for _ in range(50)}
    assert len(drawn) == 50 and all(0 <= seed < 2**63 for seed in drawn)
    assert max(drawn) > 2**56  # all 63 bits are drawn


def test_fresh_seeds_depend_on_no_generator_that_programs_seed() -> None:
    drawn = set()
    for _ in range(2):
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        drawn |= {Request(id="a", prompt=(1,)).seed for _ in range(3)}
    assert len(drawn) == 6


def test_requests_travel_with_their_seed() -> None:
    request = Request(id="a", prompt=(1, 2), params=SamplingParams(stop=("x",), top_p=0.5))
    assert pickle.loads(pickle.dumps(request)) == request


def _limits(**changes: int) -> Limits:
    sizes: dict[str, Any] = {"vocab_size": 10, "context_length": 8, "num_blocks": 4}
    return Limits(**(sizes | changes))


@pytest.mark.parametrize(
    ("field", "prompt", "params"),
    [
        ("prompt", (), {}),
        ("prompt", (1, 10), {}),
        ("prompt", (-1,), {}),
        ("prompt", (1.0,), {}),
        ("prompt", (True,), {}),
        ("logit_bias", (1,), {"logit_bias": ((10, 1.0),)}),
        ("logit_bias", (1,), {"logit_bias": tuple((token, 1.0) for token in range(4))}),
        ("stop_token_ids", (1,), {"stop_token_ids": (10,)}),
        ("stop_token_ids", (1,), {"stop_token_ids": (1, 2, 3)}),
        ("stop", (1,), {"stop": ("a", "b", "c")}),
        ("stop", (1,), {"stop": ("abcdef",)}),
        ("n", (1,), {"n": 10**6}),
        ("logprobs", (1,), {"logprobs": 6}),
        ("prompt_logprobs", (1,), {"prompt_logprobs": 10**6}),
    ],
)
def test_what_an_engine_cannot_take_is_refused_by_name(
    field: str, prompt: tuple[Any, ...], params: dict[str, Any]
) -> None:
    limits = _limits(
        max_logit_biases=3, max_stops=2, max_stop_length=5, max_choices=9, max_logprobs=5
    )
    with pytest.raises(ConfigError) as refusal:
        limits.check(Request(id="a", prompt=prompt, params=SamplingParams(**params)))
    assert refusal.value.field == field


def test_more_log_probabilities_than_tokens_are_refused() -> None:
    request = Request(id="a", prompt=(1,), params=SamplingParams(logprobs=11))
    with pytest.raises(ConfigError, match="at most 10"):
        _limits(max_logprobs=20).check(request)


@pytest.mark.parametrize("field", ["vocab_size", "num_blocks", "block_size", "max_waiting"])
def test_limits_below_one_are_refused(field: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        _limits(**{field: 0})
    assert refusal.value.field == field


def test_a_step_holds_a_token_of_each_that_runs() -> None:
    with pytest.raises(ConfigError, match="at least 9"):
        _limits(max_running=9, max_step_tokens=8)
