"""What goes into the sampler and comes out of it besides logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.inference.params import SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """All that decides, with its logits, about the next token of one sequence."""

    params: SamplingParams

    seed: int
    """``Request.seed``, in [0, 2^63)."""

    choice: int
    """Index of the choice: each has a random stream of its own."""

    prompt: Sequence[int]
    """Token ids of the prompt."""

    generated: Sequence[int]
    """Token ids so far; the token to be drawn has the position len(prompt) + len(generated)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """A token and how likely the model's own distribution held it."""

    token: int

    logprob: float
    """fp32 log-softmax of the unchanged logits at ``token``."""

    top: tuple[tuple[int, float], ...]
    """(token id, log-probability) of the likeliest, falling, the lower id first among equals."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """The next token of one row."""

    token: int | None
    """None if the row's logits hold NaN or infinity, so that nothing can be said."""

    scored: Scored | None
    """Where the row's params ask for ``logprobs``, and there is a token."""
