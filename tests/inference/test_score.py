"""The training forward gives the engine's log-probabilities, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal.errors import ConfigError
from shoal.inference import Request, SamplingParams
from shoal.inference.engine import Engine
from shoal.inference.offline import joined, stream
from shoal.inference.score import Scorer
from shoal.models import Decoder, load_weights, parameter_shapes
from shoal.ops import fixed
from shoal.ops.fixed_order import cosine_and_sine
from tests.inference.small_models import RandomWeights, limits_for, random_model
from tests.models.tiny import TINY


def decoder_of(hf: dict[str, Any], dtype: torch.dtype) -> Decoder:
    config = random_model(hf, "fp32").config
    decoder = Decoder(config, dtype)
    load_weights(decoder, RandomWeights(parameter_shapes(config)))
    return decoder


@pytest.mark.parametrize("kind", ["fp32", "bf16", "mxfp8"])
@pytest.mark.parametrize("name", ["mistral", "qwen2_moe", "olmoe"])
def test_scores_equal_the_engines(name: str, kind: fixed.Kind) -> None:
    model = random_model(TINY[name], kind)
    engine = Engine(model, limits_for(model, max_step_tokens=16))
    lines, expected = [], []
    for length in (1, 15, 17, 40):
        params = SamplingParams(
            max_tokens=9, seed=length, ignore_eos=True, logprobs=0, prompt_logprobs=0
        )
        prompt = tuple(range(100, 100 + length))
        (answer,) = joined(list(stream(engine, Request(id="a", prompt=prompt, params=params))))
        assert answer.prompt_logprobs is not None and answer.logprobs is not None
        scored = [*answer.prompt_logprobs[1:], *answer.logprobs]
        lines.append((*prompt, *answer.token_ids))
        expected.append(tuple(each.logprob for each in scored if each is not None))
    found = list(Scorer(decoder_of(TINY[name], model.dtype), kind).score(enumerate(lines, 1)))
    assert found == expected


def test_scores_are_close_to_those_of_the_plain_forward() -> None:
    decoder = decoder_of(TINY["qwen3_moe"], torch.float32).eval()
    lines = [list(range(9)), [5], list(range(40, 80))]
    found = Scorer(decoder, "fp32").score(enumerate(lines, 1))
    for line, scores in zip(lines, found, strict=True):
        tokens = torch.tensor([line])
        labels = torch.cat([tokens[:, 1:], torch.tensor([[-100]])], dim=1)
        with torch.no_grad():
            output = decoder(tokens, labels=labels, each_label=True)
            total = decoder(tokens, labels=labels).loss_sum
        assert output.log_probabilities is not None and total is not None
        torch.testing.assert_close(torch.tensor(scores), output.log_probabilities[0, :-1])
        torch.testing.assert_close(-output.log_probabilities.sum(), total)


def test_a_wrong_line_is_named() -> None:
    scorer = Scorer(decoder_of(TINY["llama2"], torch.float32), "fp32")
    for line, problem in (
        ([], "no tokens"),
        ([3, 257], "outside the vocabulary"),
        ([3] * 65, "longer than the context"),
    ):
        with pytest.raises(ConfigError, match=f"line 7, .*{problem}"):
            list(scorer.score([(3, [1, 2]), (7, line)]))


def test_cosine_and_sine_do_not_depend_on_place() -> None:
    angles = torch.randn(1001) * 10_000
    cosine, sine = cosine_and_sine(angles)
    for at in (0, 7, 500, 999, 1000):
        alone = cosine_and_sine(angles[at : at + 1])
        assert (alone[0].item(), alone[1].item()) == (cosine[at].item(), sine[at].item())
    torch.testing.assert_close(cosine, angles.double().cos().float(), rtol=0, atol=0)
