"""From a body to the sampling parameters of an engine."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from shoal.inference.params import SamplingParams
from shoal_deployments.openai.requests import ChatCompletionBody, CompletionBody, GenerationBody

DEFAULT_MAX_TOKENS = 16
"""Of completions, as in OpenAI's API; a chat's answer may fill the context."""

_COMMON = tuple(
    field.name for field in fields(SamplingParams) if field.name in GenerationBody.model_fields
)
"""Parameters that both bodies have, under the same name and with the same meaning."""


def completion_params(body: CompletionBody) -> SamplingParams:
    """Parameters of a completion; ConfigError where two fields contradict each other."""
    return SamplingParams(
        **{"max_tokens": DEFAULT_MAX_TOKENS} | _common(body),
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )


def chat_params(body: ChatCompletionBody) -> SamplingParams:
    """Parameters of a chat's answer; ConfigError where two fields contradict each other."""
    newer = body.max_completion_tokens
    return SamplingParams(
        **_common(body) | ({} if newer is None else {"max_tokens": newer}),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )


def _common(body: GenerationBody) -> dict[str, Any]:
    """What both have; a field that is null keeps the engine's default."""
    given = {name: getattr(body, name) for name in _COMMON}
    return {name: _frozen(value) for name, value in given.items() if value is not None}


def _frozen(value: Any) -> Any:
    """``value`` as parameters hold it: a mapping as sorted pairs, a list as a tuple."""
    if isinstance(value, dict):
        return tuple(sorted(value.items()))
    return tuple(value) if isinstance(value, list) else value
