"""What a request does to its logits before they are a distribution: penalties, bias, no end yet."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from shoal.inference.sampler.row import Row

Floats = npt.NDArray[np.float32]


def adjusted(logits: Floats, row: Row, end_ids: Collection[int]) -> Floats:
    """Logits ``[V]`` of ``row`` after its wishes; ``logits`` itself where it has none.

    In this order, each in fp32: the repetition penalty r, on tokens of prompt and answer (Keskar
    et al. 2019, arXiv:1909.05858; l / r above zero, l * r below); the frequency penalty times the
    count in the answer and the presence penalty if there is any, subtracted as in OpenAI's API;
    the bias, added; and while the answer has fewer than ``min_tokens`` tokens, -inf for
    ``end_ids`` (unless they are ignored anyway) and the stop tokens.
    """
    params = row.params
    is_early = len(row.generated) < params.min_tokens
    if not (params.changes_logits or is_early):
        return logits
    logits = logits.copy()
    if params.repetition_penalty != 1:
        _penalize_repetition(logits, row)
    if params.frequency_penalty != 0 or params.presence_penalty != 0:
        _penalize_occurrence(logits, row)
    for token, bias in params.logit_bias:
        logits[token] += np.float32(bias)
    if is_early:
        ends = [*params.stop_token_ids, *(() if params.ignore_eos else end_ids)]
        logits[ends] = -np.inf
    return logits


def _penalize_repetition(logits: Floats, row: Row) -> None:
    penalty = np.float32(row.params.repetition_penalty)
    seen = np.array([*row.prompt, *row.generated], dtype=np.int64)
    values = logits[seen]
    logits[seen] = np.where(values > 0, values / penalty, values * penalty)


def _penalize_occurrence(logits: Floats, row: Row) -> None:
    tokens, counts = np.unique(np.array(row.generated, dtype=np.int64), return_counts=True)
    logits[tokens] -= np.float32(row.params.frequency_penalty) * counts.astype(np.float32)
    logits[tokens] -= np.float32(row.params.presence_penalty)
