"""Log-probabilities of given tokens by the trainer's forward pass, in the engine's arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from shoal.errors import ConfigError
from shoal.models import Decoder
from shoal.ops import fixed
from shoal.ops.cross_entropy import IGNORED
from shoal.ops.fixed_order import fixed_order

_PASS_TOKENS = 2048
"""Tokens of a forward pass, unless a single line has more."""


class Scorer:
    """A decoder of ``shoal.models`` that gives the bits of the serving engine."""

    def __init__(self, decoder: Decoder, precision: fixed.Kind) -> None:
        """``decoder`` holds fp32 weights for ``fp32`` and bf16 weights for the other two."""
        self._decoder = decoder.eval()
        self._precision = precision
        config = decoder.config
        # Dynamic scaling looks at the length of what it is given.
        dynamic = config.rotary.kind == "dynamic"
        self._most_tokens = config.max_position_embeddings if dynamic else _PASS_TOKENS

    def score(self, lines: Iterable[tuple[int, Sequence[int]]]) -> Iterator[tuple[float, ...]]:
        """For each line its tokens' log-probabilities from the second on, given those before.

        A line is its number in the user's file, for messages, and its tokens. Lines are packed
        into passes as training packs its documents; that changes no bit. Raises
        ConfigError for a line without tokens, with a token outside the vocabulary, or longer than
        the model's context.
        """
        with fixed_order(self._precision):
            pending: list[Sequence[int]] = []
            for number, line in lines:
                self._check(number, line)
                if pending and sum(map(len, pending)) + len(line) > self._most_tokens:
                    yield from self._pass(pending)
                    pending = []
                pending.append(line)
            if pending:
                yield from self._pass(pending)

    def _pass(self, lines: list[Sequence[int]]) -> Iterator[tuple[float, ...]]:
        """Lines as documents of one sequence."""
        lengths = torch.tensor([len(line) for line in lines])
        tokens = torch.tensor([token for line in lines for token in line])
        starts = lengths.cumsum(0) - lengths
        labels = tokens.roll(-1)
        labels[starts + lengths - 1] = IGNORED
        positions = torch.arange(len(tokens)) - starts.repeat_interleave(lengths)
        documents = torch.arange(len(lines)).repeat_interleave(lengths)
        output = self._decoder(
            tokens.unsqueeze(0),
            positions=positions.unsqueeze(0),
            documents=documents.unsqueeze(0),
            labels=labels.unsqueeze(0),
            each_label=True,
        )
        scores = output.log_probabilities.squeeze(0)
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            yield tuple(scores[start : start + length - 1].tolist())

    def _check(self, number: int, line: Sequence[int]) -> None:
        config = self._decoder.config
        problem, remedy = None, "Correct the line"
        if not line:
            problem = "it has no tokens"
        elif not all(0 <= token < config.vocab_size for token in line):
            problem = f"a token is outside the vocabulary of {config.vocab_size}"
        elif len(line) > config.max_position_embeddings:
            problem = f"it is longer than the context of {config.max_position_embeddings} tokens"
            remedy = "Shorten it"
        if problem is not None:
            raise ConfigError("FILE", f"line {number}, {len(line)} tokens", problem, remedy)
