"""Which tokens of a row may be drawn: top-k, top-p and min-p.

All three keep a beginning of the tokens sorted by falling logit, the lower id first among equals.
They act one after the other as in ``transformers``: top-k, then top-p over the probability that
top-k has left, then min-p relative to the likeliest token. Probabilities are added in fp64, one
row at a time and in an order that the row alone decides. Sorting a whole row is slow, so it is
searched from above in steps: the tokens that are kept mostly lie far above the many others.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from shoal.inference.params import SamplingParams

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

_DEPTHS = (2, 4, 8, 16, 32)
"""Distances below the largest logit at which the search stops."""

_BINS_PER_UNIT = 64
_NOTHING = np.float32(-np.inf)


def kept(logits: Floats, largest: int, params: SamplingParams) -> Ids | None:
    """Ids that may be drawn from ``logits`` ``[V]``; None for all.

    ``largest`` is the id of the largest logit. The likeliest token is always kept.
    """
    is_narrow = 0 < params.top_k < len(logits)
    if not is_narrow and params.top_p == 1 and params.min_p == 0:
        return None
    scaled = (logits - logits[largest]) / np.float32(params.temperature)
    cut = np.float32(np.log(params.min_p)) if params.min_p > 0 else _NOTHING
    ids: Ids
    if is_narrow:
        ids = likeliest(scaled, largest, params.top_k)
        if params.top_p < 1:
            weights = _weights(scaled[ids])
            ids = ids[: _num_needed(weights, params.top_p * float(np.cumsum(weights)[-1]))]
    elif params.top_p < 1:
        ids = _nucleus(scaled, largest, params.top_p)
    else:
        ids = np.flatnonzero(scaled >= cut)
    ids = ids[scaled[ids] >= cut]
    return ids


def likeliest(values: Floats, largest: int, count: int) -> Ids:
    """Ids of the ``count`` largest of ``values`` ``[V]``, falling, lower ids first among equals."""
    for ids in _upper_sets(values, largest):
        if len(ids) >= count:
            break
    if len(ids) > 4 * count:
        smallest = np.partition(values[ids], len(ids) - count)[len(ids) - count]
        ids = ids[values[ids] >= smallest]
    return _ranked(values, ids)[:count]


def _nucleus(scaled: Floats, largest: int, top_p: float) -> Ids:
    """The fewest likeliest ids that together have ``top_p`` of the probability."""
    weights = _weights(scaled)
    goal = top_p * float(weights.sum())
    for ids in _upper_sets(scaled, largest):
        if float(weights[ids].sum()) >= goal:
            break
    # Only the bin that the border runs through has to be sorted.
    bins = np.minimum(scaled[ids] * -_BINS_PER_UNIT, _DEPTHS[-1] * _BINS_PER_UNIT).astype(np.int64)
    sums = np.cumsum(np.bincount(bins, weights[ids]))
    border = min(int(np.searchsorted(sums, goal)), len(sums) - 1)
    before = float(sums[border - 1]) if border else 0.0
    ranked = _ranked(scaled, ids[bins == border])
    count = _num_needed(weights[ranked], goal - before)
    return np.concatenate([ids[bins < border], ranked[:count]])


def _num_needed(weights: Doubles, goal: float) -> int:
    """How many of the falling ``weights`` it takes to reach ``goal``; all if they do not."""
    return min(int(np.searchsorted(np.cumsum(weights), goal)) + 1, len(weights))


def _weights(scaled: Floats) -> Doubles:
    """Probabilities relative to the likeliest token's."""
    return np.exp(scaled.astype(np.float64))


def _ranked(values: Floats, ids: Ids) -> Ids:
    """Rising ``ids`` by falling value."""
    order: Ids = ids[np.argsort(-values[ids], kind="stable")]
    return order


def _upper_sets(values: Floats, largest: int) -> Iterator[Ids]:
    """Growing sets of rising ids: all that are within some distance of the largest, then all."""
    for depth in _DEPTHS:
        yield np.flatnonzero(values >= values[largest] - np.float32(depth))
    yield np.arange(len(values))
