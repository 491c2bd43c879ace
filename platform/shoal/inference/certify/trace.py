"""What an engine answered, to the last bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.errors import WorkError
from shoal.inference.engine import Engine
from shoal.inference.offline import Answer, joined
from shoal.inference.protocol import Output, TokenLogprob
from shoal.inference.request import Request


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """Tokens and log-probabilities of all choices of a request; floats hold fp32 exactly."""

    tokens: tuple[int, ...]

    logprobs: tuple[float, ...]
    """One for each token."""

    top: tuple[tuple[tuple[int, float], ...], ...] | None = None
    """The likeliest of each step; unset where they were not taken."""

    prompt_logprobs: tuple[float, ...] | None = None
    """Of the prompt's tokens from the second on; unset where they were not taken."""

    @staticmethod
    def of(answers: Sequence[Answer]) -> Trace:
        """The trace of one request's choices, which have log-probabilities."""
        logprobs = [each for answer in answers for each in answer.logprobs or ()]
        prompt = answers[0].prompt_logprobs
        return Trace(
            tokens=tuple(token for answer in answers for token in answer.token_ids),
            logprobs=tuple(each.logprob for each in logprobs),
            top=tuple(each.top for each in logprobs),
            prompt_logprobs=None if prompt is None else _values(prompt),
        )

    def difference(self, other: Trace) -> str | None:
        """The first difference of ``other`` in what both have, in words; None for the same bits."""
        if self.prompt_logprobs is not None and other.prompt_logprobs is not None:
            pairs = zip(self.prompt_logprobs, other.prompt_logprobs, strict=True)
            for at, (expected, found) in enumerate(pairs, 1):
                if expected != found:
                    return f"log-probability of prompt token {at} is {found!r}, not {expected!r}"
        if len(self.tokens) != len(other.tokens):
            return f"it has {len(other.tokens)} tokens, not {len(self.tokens)}"
        for at, (expected_token, token) in enumerate(zip(self.tokens, other.tokens, strict=True)):
            expected, found = self.logprobs[at], other.logprobs[at]
            if token != expected_token:
                return f"token {at} is {token}, not {expected_token}"
            if expected != found:
                return f"log-probability of token {at} is {found!r}, not {expected!r}"
            if self.top is not None and other.top is not None and self.top[at] != other.top[at]:
                return f"the likeliest at token {at} are {other.top[at]}, not {self.top[at]}"
        return None


def _values(prompt: Sequence[TokenLogprob | None]) -> tuple[float, ...]:
    return tuple(each.logprob for each in prompt if each is not None)


def run(engine: Engine, arrivals: Sequence[tuple[int, Request]]) -> dict[str, Trace]:
    """Serve requests that come before the steps of these numbers; the trace of each by its id.

    Where nothing is left to compute, the next to come comes at once. Raises WorkError where an
    answer ended as an error.
    """
    coming = sorted(arrivals, key=lambda arrival: arrival[0])
    outputs: dict[str, list[Output]] = {}
    number = 0
    while coming or engine.has_work:
        while coming and (coming[0][0] <= number or not engine.has_work):
            engine.add(coming.pop(0)[1])
        for output in engine.step():
            if output.error is not None:
                raise WorkError(f"{output.request_id} failed: {output.error}.")
            outputs.setdefault(output.request_id, []).append(output)
        number += 1
    return {request_id: Trace.of(joined(found)) for request_id, found in outputs.items()}
