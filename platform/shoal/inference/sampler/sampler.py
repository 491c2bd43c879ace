"""The sampler: fp32 logits in, tokens and log-probabilities out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from shoal.inference.sampler.adjustments import adjusted
from shoal.inference.sampler.filters import kept, likeliest
from shoal.inference.sampler.gumbel import Stream, draw
from shoal.inference.sampler.row import Row, Sampled, Scored
from shoal.ops.fixed.softmax import log_normalizer

Floats = npt.NDArray[np.float32]


class Sampler:
    """Draws the next tokens of rows that have nothing to do with each other.

    What comes out for a row depends on its logits and its ``Row`` alone: not on the other rows,
    their number or order, nor on threads. There is no state. ``vocab_size`` is V, the width of
    the logits, and ``end_ids`` are the model's end-of-text tokens.
    """

    def __init__(self, vocab_size: int, end_ids: Sequence[int] = ()) -> None:
        self._vocab_size = vocab_size
        self._end_ids = tuple(end_ids)

    def sample(self, logits: torch.Tensor, rows: Sequence[Row]) -> list[Sampled]:
        """Next token of each row of ``logits``, fp32 ``[R, V]`` on the CPU; R is len(rows)."""
        values: Floats = logits.numpy()
        assert values.dtype == np.float32 and values.shape == (len(rows), self._vocab_size)
        if not rows:
            return []
        largest = values.argmax(axis=1)
        tokens = [
            self._token(line, int(peak), row)
            for line, peak, row in zip(values, largest, rows, strict=True)
        ]
        wanted = [
            (at, token, row.params.logprobs)
            for at, (token, row) in enumerate(zip(tokens, rows, strict=True))
            if token is not None and row.params.logprobs is not None
        ]
        scored = dict.fromkeys(range(len(rows)), None) | self._score(logits, largest, wanted)
        return [Sampled(token=token, scored=scored[at]) for at, token in enumerate(tokens)]

    def score(self, logits: torch.Tensor, tokens: Sequence[int], num_top: int) -> list[Scored]:
        """Log-probability of each row's token, and its ``num_top`` likeliest; NaN stays NaN."""
        largest = logits.numpy().argmax(axis=1) if len(tokens) else np.empty(0, np.int64)
        wanted = [(at, token, num_top) for at, token in enumerate(tokens)]
        return list(self._score(logits, largest, wanted).values())

    def _token(self, logits: Floats, largest: int, row: Row) -> int | None:
        # argmax stops at NaN if there is one, and at +inf before any number.
        if not np.isfinite(logits[largest]):
            return None
        wished = adjusted(logits, row, self._end_ids)
        if wished is not logits:
            largest = int(wished.argmax())
            if not np.isfinite(wished[largest]):
                return None
        if row.params.is_greedy:
            return largest
        stream = Stream(
            seed=row.seed, choice=row.choice, position=len(row.prompt) + len(row.generated)
        )
        return draw(
            wished,
            largest,
            stream,
            temperature=row.params.temperature,
            ids=kept(wished, largest, row.params),
        )

    def _score(
        self,
        logits: torch.Tensor,
        largest: npt.NDArray[np.int64],
        wanted: Sequence[tuple[int, int, int]],
    ) -> dict[int, Scored]:
        """Row number to score, for triples of row number, token and how many likeliest."""
        if not wanted:
            return {}
        picked = logits
        if len(wanted) < len(logits):
            picked = logits[[at for at, _, _ in wanted]]
        normalizers: Floats = log_normalizer(picked).numpy()
        scores = {}
        for (at, token, num_top), normalizer in zip(wanted, normalizers, strict=True):
            line: Floats = logits[at].numpy()
            top = likeliest(line, int(largest[at]), num_top) if num_top else ()
            scores[at] = Scored(
                token=token,
                logprob=float(line[token] - normalizer),
                top=tuple((int(each), float(line[each] - normalizer)) for each in top),
            )
        return scores
