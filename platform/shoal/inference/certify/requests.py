"""The requests that are asked again and again: greedy and seeded, at the borders of blocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shoal.errors import ConfigError
from shoal.inference.params import SamplingParams
from shoal.inference.request import Request
from shoal.models import DecoderConfig

_ANSWER_TOKENS = 8
_LONG_ANSWER_TOKENS = 40
_SHORTEST_CONTEXT = 48


@dataclass(frozen=True, kw_only=True, slots=True)
class Questions:
    """Requests made of a model's config alone, so that every process asks the same."""

    block_size: int

    plain: tuple[Request, ...]
    """Of many lengths, greedy and seeded in turn; the last has two choices."""

    scored: Request
    """A long prompt of which every token is scored."""

    long: tuple[Request, ...]
    """Short prompts with answers over several blocks of 16 tokens."""

    @staticmethod
    def of(config: DecoderConfig) -> Questions:
        """Raises ConfigError for a context too short to prove anything in."""
        context = config.max_position_embeddings
        if context < _SHORTEST_CONTEXT:
            raise ConfigError(
                "model.config.max_position_embeddings",
                context,
                "the proof asks for longer texts than this context holds",
                f"Certify a model with a context of at least {_SHORTEST_CONTEXT} tokens",
            )
        block_size = 64 if context >= 64 * 2 + 2 + _ANSWER_TOKENS else 16
        lengths = [1, 5]
        for border in (block_size, 2 * block_size):
            lengths += [border - 1, border, border + 1]
        vocabulary = config.vocab_size
        plain = [
            _request(f"{kind}-{length}", length, vocabulary, _ANSWER_TOKENS, kind)
            for length in lengths
            for kind in ("greedy", "seeded")
        ]
        plain.append(_request("seeded-twice", 7, vocabulary, _ANSWER_TOKENS, "seeded", n=2))
        return Questions(
            block_size=block_size,
            plain=tuple(plain),
            scored=_request("scored", lengths[-1], vocabulary, 2, "greedy", prompt_logprobs=1),
            long=tuple(
                _request(
                    f"long-{kind}-{length}",
                    length,
                    vocabulary,
                    min(_LONG_ANSWER_TOKENS, context - length),
                    kind,
                )
                for length, kind in ((3, "greedy"), (6, "seeded"), (4, "greedy"), (7, "seeded"))
            ),
        )

    @property
    def all(self) -> tuple[Request, ...]:
        """Every one of them."""
        return *self.plain, self.scored, *self.long


def _request(
    name: str,
    length: int,
    vocabulary: int,
    max_tokens: int,
    kind: str,
    *,
    n: int = 1,
    prompt_logprobs: int | None = None,
) -> Request:
    # A stream of its own for each name: prompts share no beginning unless a condition wants it.
    generator = np.random.Generator(np.random.Philox(int.from_bytes(name.encode()) % 2**64))
    return Request(
        id=name,
        prompt=tuple(generator.integers(0, vocabulary, length).tolist()),
        params=SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0 if kind == "greedy" else 0.9,
            top_p=1.0 if kind == "greedy" else 0.95,
            seed=len(name),
            n=n,
            ignore_eos=True,
            logprobs=2,
            prompt_logprobs=prompt_logprobs,
        ),
    )
