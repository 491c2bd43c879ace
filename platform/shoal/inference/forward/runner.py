"""From a step of the scheduler to tokens: rows, model, head, sampler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shoal.inference.forward.model import ServedModel
from shoal.inference.forward.replay import Replays
from shoal.inference.forward.rows import Rows
from shoal.inference.sampler import Row, Sampled, Sampler, Scored
from shoal.inference.scheduling.step import Chunk, Step

_LOGIT_BYTES = 64 * 2**20
"""Most fp32 logits that exist at a time, unless a single row takes more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    """What a step gave."""

    sampled: tuple[Sampled, ...]
    """One for each of ``step.sampled``."""

    scored: tuple[tuple[Scored, ...], ...]
    """For each of ``step.chunks`` the tokens after its ``scored`` rows."""


class Runner:
    """Computes steps with one model and one KV cache."""

    def __init__(
        self, model: ServedModel, sampler: Sampler, *, num_blocks: int, block_size: int
    ) -> None:
        self._model = model
        self._sampler = sampler
        self._block_size = block_size
        self._cache = model.new_cache(num_blocks, block_size)
        self._replays = Replays(model, self._cache)
        self._most_rows = max(_LOGIT_BYTES // (4 * model.config.vocab_size), 1)

    def run(self, step: Step) -> Results:
        """Compute a step that is not empty; the keys and values of its rows are in the cache."""
        rows = Rows.of(step.chunks, self._block_size)
        sampling, scoring = _wanted(step.chunks)
        wanted = sampling + scoring
        everything = len(wanted) == rows.tokens.shape[0] and not scoring
        if not wanted:
            # The last layer's keys and values are all that is left to compute.
            wanted = [0]
        index = None if everything else torch.tensor(wanted)
        hidden = None if index is not None else self._replays.forward(rows)
        if hidden is None:
            hidden = self._model.forward(rows, self._cache, index)
        sampled = self._sample(hidden[: len(sampling)], step.sampled)
        scored = self._score(hidden[len(sampling) : len(sampling) + len(scoring)], step.chunks)
        return Results(sampled=sampled, scored=scored)

    def _sample(self, hidden: torch.Tensor, chunks: Sequence[Chunk]) -> tuple[Sampled, ...]:
        sampled: list[Sampled] = []
        for start in range(0, len(chunks), self._most_rows):
            stop = start + self._most_rows
            rows = [_row(chunk) for chunk in chunks[start:stop]]
            sampled += self._sampler.sample(self._model.logits(hidden[start:stop]), rows)
        return tuple(sampled)

    def _score(
        self, hidden: torch.Tensor, chunks: Sequence[Chunk]
    ) -> tuple[tuple[Scored, ...], ...]:
        scored: list[tuple[Scored, ...]] = []
        first = 0
        for chunk in chunks:
            prompt = chunk.sequence.request.prompt
            num_top = chunk.sequence.request.params.prompt_logprobs or 0
            found: list[Scored] = []
            for start in range(0, len(chunk.scored), self._most_rows):
                positions = chunk.scored[start : start + self._most_rows]
                targets = [prompt[position + 1] for position in positions]
                here = hidden[first + start : first + start + len(positions)]
                logits = self._model.logits(here)
                found += self._sampler.score(logits, targets, num_top)
            first += len(chunk.scored)
            scored.append(tuple(found))
        return tuple(scored)


def _wanted(chunks: Sequence[Chunk]) -> tuple[list[int], list[int]]:
    """Rows that give a token, in order, and rows that score one."""
    sampling: list[int] = []
    scoring: list[int] = []
    first = 0
    for chunk in chunks:
        offset = first - chunk.start
        scoring += range(chunk.scored.start + offset, chunk.scored.stop + offset)
        first += chunk.count
        if chunk.samples:
            sampling.append(first - 1)
    return sampling, scoring


def _row(chunk: Chunk) -> Row:
    sequence = chunk.sequence
    request = sequence.request
    return Row(
        params=request.params,
        seed=request.seed,
        choice=sequence.index,
        prompt=request.prompt,
        generated=sequence.generated,
    )
