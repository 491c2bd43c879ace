"""Which tokens of a row may be drawn: top-k, top-p and min-p.

All three keep a beginning of the tokens sorted by falling logit, the lower id first among equals.
They act one after the other as in ``transformers``: top-k, then top-p over the probability that
top-k has left, then min-p relative to the likeliest token. A sum of probabilities is taken in fp64
along that order, or over all tokens of the row in the order of their ids, one row at a time: its
bits depend on the row alone. The row is searched from above in steps, because the tokens that are
kept mostly lie far above the many others and sorting all of those is slow.
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


def kept(logits: Floats, largest: int, params: SamplingParams) -> Ids | None:
    """Ids that may be drawn from ``logits`` ``[V]``; None for all.

    ``largest`` is the id of the largest logit. The likeliest token is always kept.
    """
    is_narrow = 0 < params.top_k < len(logits)
    if not is_narrow and params.top_p == 1 and params.min_p == 0:
        return None
    scaled = (logits - logits[largest]) / np.float32(params.temperature)
    if is_narrow:
        ids = likeliest(scaled, largest, params.top_k)
        if params.top_p < 1:
            ids = ids[: _num_needed(_weights(scaled[ids]), params.top_p)]
    elif params.top_p < 1:
        ids = _nucleus(scaled, largest, params.top_p)
    else:
        ids = np.arange(len(scaled))
    if params.min_p > 0:
        ids = ids[scaled[ids] >= np.float32(np.log(params.min_p))]
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
    total = float(_weights(scaled).sum())
    for ids in _upper_sets(scaled, largest):
        ranked = _ranked(scaled, ids)
        weights = _weights(scaled[ranked])
        count = _num_needed(weights, top_p, total)
        # The last set is all there is; before it, rounding must not make a set seem enough.
        if count < len(ids):
            break
    return ranked[:count]


def _num_needed(weights: Doubles, top_p: float, total: float | None = None) -> int:
    """How many of the falling ``weights`` it takes to reach ``top_p`` of ``total``."""
    sums = np.cumsum(weights)
    goal = top_p * (float(sums[-1]) if total is None else total)
    return min(int(np.searchsorted(sums, goal)) + 1, len(weights))


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
