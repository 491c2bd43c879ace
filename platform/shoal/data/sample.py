"""One training sequence, and how it is cut from a stream of documents.

The stream of a source is all its documents end to end. Sequence i of length S reads the tokens
[i S, i S + S + 1): S inputs and, one further, their labels, so every token but the first of its
document is a label of exactly one sequence, also where a sequence ends on it. Labels are fixed
here, before anything cuts the sequence again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IGNORED = -100
"""The label that no loss counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One sequence; every array is int64 [S]."""

    tokens: npt.NDArray[np.int64]

    labels: npt.NDArray[np.int64]
    """The token that follows, or ``IGNORED`` where it belongs to another document, is masked, or
    is padding."""

    positions: npt.NDArray[np.int64]
    """Distance from the start of the document, or of the sequence if the document began before."""

    documents: npt.NDArray[np.int64]
    """Number of the document within the sequence, from 0; padding counts as one more. Tokens may
    attend to their own document only."""


def cut_sample(
    window: npt.NDArray[np.integer],
    is_label: npt.NDArray[np.bool_],
    starts: npt.NDArray[np.int64],
    *,
    seq_len: int,
    padding: int,
) -> Sample:
    """Make a sample from up to S + 1 consecutive tokens of the stream.

    ``window``: 1 to S + 1 token ids; ``is_label``, as long: which of them may be labels;
    ``starts``: indices into ``window``, above 0, at which a document starts; ``padding`` fills up a
    short window.
    """
    length = len(window)
    tokens = np.full(seq_len + 1, padding, dtype=np.int64)
    tokens[:length] = window
    may_be_label = np.zeros(seq_len + 1, dtype=np.bool_)
    may_be_label[:length] = is_label
    is_start = np.zeros(seq_len + 1, dtype=np.bool_)
    is_start[starts] = True
    is_start[length : length + 1] = True  # of the padding; empty for a full window
    documents = np.cumsum(is_start, dtype=np.int64)
    index = np.arange(seq_len + 1)
    positions = index - np.maximum.accumulate(np.where(is_start, index, 0))
    counts = (documents[1:] == documents[:-1]) & may_be_label[1:]
    return Sample(
        tokens=tokens[:-1],
        labels=np.where(counts, tokens[1:], IGNORED),
        positions=positions[:-1],
        documents=documents[:-1],
    )
