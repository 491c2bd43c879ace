"""From a body to the sampling parameters of an engine."""

from __future__ import annotations

from typing import Any

from shoal.inference.params import SamplingParams
from shoal_deployments.openai.requests import ChatCompletionBody, CompletionBody, GenerationBody

DEFAULT_MAX_TOKENS = 16
"""Of completions, as in OpenAI's API; a chat's answer may fill the context."""

_SAME_NAME = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "min_tokens",
    "ignore_eos",
    "priority",
)


def completion_params(body: CompletionBody) -> SamplingParams:
    """Parameters of a completion; ConfigError where two fields contradict each other."""
    return SamplingParams(
        **_common(body),
        max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )


def chat_params(body: ChatCompletionBody) -> SamplingParams:
    """Parameters of a chat's answer; ConfigError where two fields contradict each other."""
    newer = body.max_completion_tokens
    return SamplingParams(
        **_common(body),
        max_tokens=body.max_tokens if newer is None else newer,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )


def _common(body: GenerationBody) -> dict[str, Any]:
    """What both have; a field that is null keeps the engine's default."""
    values = {name: getattr(body, name) for name in _SAME_NAME if getattr(body, name) is not None}
    if body.logit_bias:
        values["logit_bias"] = tuple(sorted(body.logit_bias.items()))
    if body.stop:
        values["stop"] = tuple(body.stop)
    if body.stop_token_ids:
        values["stop_token_ids"] = tuple(body.stop_token_ids)
    return values
