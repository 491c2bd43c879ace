"""How one request wants its text: the values that a client may send, checked once."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shoal.errors import ConfigError

MAX_SEED = 2**63 - 1
MAX_PRIORITY = 100
"""Priorities lie in [-100, 100]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Sampling parameters of a request, named as in OpenAI's API and vLLM's extensions of it.

    What one engine cannot take (ids outside its vocabulary, more tokens than its KV pool) is the
    business of ``Limits.check``; a value that exists is valid everywhere. ConfigError, with the
    field's name, for a wrong type, NaN, infinity or a value out of range.
    """

    max_tokens: int | None = None
    """Most tokens to generate, at least 0; unset: as many as the context and the pool hold."""

    min_tokens: int = 0
    """Tokens before which no end (end-of-text, stop token, stop string) is possible."""

    n: int = 1
    """Choices: independent answers to one prompt."""

    temperature: float = 1.0
    """Divides the logits; below 1e-6 the likeliest token is taken, the lowest id among equals."""

    top_k: int = 0
    """Keep the k likeliest tokens, lower ids first among equals; 0 keeps all."""

    top_p: float = 1.0
    """Keep the fewest likeliest tokens whose probability reaches this, in [0, 1]; 0 keeps one."""

    min_p: float = 0.0
    """Keep tokens at least this many times as likely as the likeliest, in [0, 1]."""

    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens seen in prompt or answer, in
    [0.01, 100]."""

    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens seen in the answer, in [-2, 2]."""

    frequency_penalty: float = 0.0
    """Subtracted once for each time that a token was seen in the answer, in [-2, 2]."""

    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what to add to its logit), each bias in [-100, 100], no id twice."""

    seed: int | None = None
    """In [0, 2^63): the same answer each time; unset: a fresh seed for each request."""

    stop: tuple[str, ...] = ()
    """Texts that end the answer before them; none empty."""

    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the answer; their text is left out."""

    ignore_eos: bool = False
    """Whether the model's own end-of-text tokens do not end the answer."""

    logprobs: int | None = None
    """Unset: no log-probabilities; otherwise the sampled token's and this many likeliest."""

    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt."""

    priority: int = 0
    """Lower goes first, as in vLLM, in [-100, 100]; what it means: ``Scheduler``."""

    def __post_init__(self) -> None:
        for field, low in (("min_tokens", 0), ("n", 1), ("top_k", 0)):
            _check_integer(field, getattr(self, field), low, None)
        for field in ("max_tokens", "logprobs", "prompt_logprobs"):
            if getattr(self, field) is not None:
                _check_integer(field, getattr(self, field), 0, None)
        if self.seed is not None:
            _check_integer("seed", self.seed, 0, MAX_SEED)
        _check_integer("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY)
        _check_number("temperature", self.temperature, 0.0, 1e6)
        _check_number("top_p", self.top_p, 0.0, 1.0)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        self._check_tokens()
        self._check_stops()
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ConfigError(
                "min_tokens",
                self.min_tokens,
                f"an answer may have no more than {self.max_tokens} tokens",
                "Lower it",
            )

    def _check_tokens(self) -> None:
        _check_tuple("logit_bias", self.logit_bias)
        for pair in self.logit_bias:
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise ConfigError(
                    "logit_bias", pair, "it is no pair of token id and bias", "Give such pairs"
                )
            _check_integer("logit_bias", pair[0], 0, None)
            _check_number("logit_bias", pair[1], -100.0, 100.0)
        if len({token for token, _ in self.logit_bias}) < len(self.logit_bias):
            raise ConfigError(
                "logit_bias", "…", "it names a token twice", "Give one bias for each token"
            )
        _check_tuple("stop_token_ids", self.stop_token_ids)
        for token in self.stop_token_ids:
            _check_integer("stop_token_ids", token, 0, None)

    def _check_stops(self) -> None:
        _check_tuple("stop", self.stop)
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise ConfigError(
                    "stop", text, "it is not a text of at least one character", "Leave it out"
                )
        if not isinstance(self.ignore_eos, bool):
            raise ConfigError("ignore_eos", self.ignore_eos, "it is no boolean", "Give one")

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken, so that nothing is drawn."""
        return self.temperature < 1e-6 or self.top_k == 1 or self.top_p == 0

    @property
    def changes_logits(self) -> bool:
        """Whether a token's logit may differ from the model's before the temperature divides."""
        return bool(
            self.logit_bias
            or self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )


def _check_tuple(field: str, value: object) -> None:
    if not isinstance(value, tuple):
        raise ConfigError(field, value, "it is no tuple", "Give a tuple")


def _check_integer(field: str, value: object, low: int, high: int | None) -> None:
    span = f"at least {low}" if high is None else f"from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(field, value, "it is not a whole number", f"Give one {span}")
    if value < low or (high is not None and value > high):
        raise ConfigError(field, value, "it is out of range", f"Give a whole number {span}")


def _check_number(field: str, value: object, low: float, high: float) -> None:
    span = f"from {low:g} to {high:g}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(field, value, "it is not a number", f"Give one {span}")
    # NaN fails every comparison, so the test asks what is right rather than what is wrong.
    if not low <= value <= high or not math.isfinite(value):
        raise ConfigError(field, value, "it is out of range", f"Give a number {span}")
