"""Training sequences over tokenized sources, read in place."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from shoal.data.indexed_tokens import IndexedTokens, open_mask
from shoal.data.sample import Sample, cut_sample
from shoal.data.spec import DatasetSpec, TokenizedSource
from shoal.errors import WorkError


class SequenceDataset:
    """The sequences of ``spec`` by number: first those of source 0, then of source 1, and so on.

    Opening maps files and reads no token; a sequence costs two binary searches and its own bytes.
    WorkError if a file is missing or damaged, or is another one than when ``spec`` was made.
    """

    def __init__(self, spec: DatasetSpec) -> None:
        self.spec = spec
        self._sizes = spec.sizes
        self._ends = list(accumulate(spec.shares))
        self._sources = [_open(source) for source in spec.sources]
        self._masks = [open_mask(tokens) for tokens in self._sources]

    def __len__(self) -> int:
        """Sequences of one epoch."""
        return self._ends[-1]

    def __getitem__(self, number: int) -> Sample:
        """Sequence ``number``; IndexError unless 0 <= number < len."""
        if not 0 <= number < len(self):
            raise IndexError(f"sequence {number} of {len(self)}")
        source = bisect_right(self._ends, number)
        first = self._ends[source - 1] if source else 0
        seq_len = self.spec.seq_len
        start = (number - first) % self._sizes[source] * seq_len
        tokens, mask = self._sources[source], self._masks[source]
        window = tokens.tokens[start : start + seq_len + 1]
        is_label: npt.NDArray[np.bool_] = (
            np.ones(len(window), np.bool_)
            if mask is None
            else mask.tokens[start : start + seq_len + 1].astype(np.bool_)
        )
        return cut_sample(
            window,
            is_label,
            tokens.document_starts(start, start + len(window)) - start,
            seq_len=seq_len,
            padding=self.spec.end_of_text,
        )


def _open(source: TokenizedSource) -> IndexedTokens:
    tokens = IndexedTokens(source.prefix)
    if len(tokens) != source.num_tokens:
        raise WorkError(
            f"{source.prefix}.bin has {len(tokens)} tokens where {source.num_tokens} were "
            "expected: it was replaced since the run prepared its data; start the run again"
        )
    return tokens
