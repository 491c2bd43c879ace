"""Which queries attend to which keys, as pieces that a kernel takes at once.

Within a document, a chunk of queries sees the keys before it whole and itself up to the diagonal,
so it needs no mask; a sliding window does, and is walked block of queries by block of queries:

    keys      ───────────────►            keys      ───────────────►
    queries   │ whole │◣          or      queries   │    ◥█◣
              ▼ whole │█◣                           ▼      ◥█◣   window
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from shoal.parallel.context.cut import Run

_MIN_BLOCK = 128
"""Queries below which another call costs more than the scores it spares."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """Tokens that may attend to each other: the same positions of some sequences of a batch."""

    sequences: slice
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """Queries and keys; every query sees at least one of the keys."""

    sequences: slice
    queries: slice
    """Where the queries lie in their tensor."""
    keys: slice
    """Where the keys lie in theirs."""
    causal: bool = False
    """Whether queries and keys are the same tokens, each of which sees up to itself."""
    window: int | None = None
    """Newest positions that a query sees; set where some key is out of some query's sight."""
    lag: int = 0
    """How many positions the first query is behind the first key."""

    def mask(self, like: torch.Tensor) -> torch.Tensor | None:
        """What is added to the scores, ``[queries, keys]``; dtype and device of ``like``."""
        if self.window is None:
            return None
        num_queries = self.queries.stop - self.queries.start
        num_keys = self.keys.stop - self.keys.start
        query = torch.arange(self.lag, self.lag + num_queries, device=like.device).unsqueeze(1)
        key = torch.arange(num_keys, device=like.device)
        hidden = (key > query) | (key <= query - self.window)
        return like.new_zeros(num_queries, num_keys).masked_fill_(hidden, -math.inf)


def tiles(
    queries: Sequence[Run],
    keys: Sequence[Run],
    documents: Sequence[Document],
    window: int | None,
) -> Iterator[Tile]:
    """Everything that ``queries`` see of ``keys``, each pair of tokens in one tile.

    A run of keys holds a run of queries whole, or none of it. ``window`` limits a query to that
    many newest positions, itself included.
    """
    for document in documents:
        for run in queries:
            start, stop = max(run.start, document.start), min(run.stop, document.stop)
            if start >= stop:
                continue
            sees_all = window is None or stop - document.start <= window
            for source in keys:
                first = max(document.start, source.start)
                if window is None or sees_all:
                    yield from _whole(document.sequences, run, source, start, stop, first)
                else:
                    yield from _banded(document.sequences, run, source, start, stop, first, window)


def _whole(
    sequences: slice, run: Run, source: Run, start: int, stop: int, first: int
) -> Iterator[Tile]:
    """Queries ``start`` to ``stop`` against keys from ``first`` on."""
    queries = run.part(start, stop)
    last = min(start, source.stop)
    if first < last:
        yield Tile(sequences=sequences, queries=queries, keys=source.part(first, last))
    if source.start <= start and stop <= source.stop:
        keys = source.part(start, stop)
        yield Tile(sequences=sequences, queries=queries, keys=keys, causal=True)


def _banded(
    sequences: slice, run: Run, source: Run, start: int, stop: int, first: int, window: int
) -> Iterator[Tile]:
    """The same within a window."""
    block = max(window, _MIN_BLOCK)
    for begin in range(start, stop, block):
        end = min(begin + block, stop)
        low, high = max(first, begin - window + 1), min(end, source.stop)
        # Queries that see none of these keys are left out: a softmax over nothing is no number.
        begin, end = max(begin, low), min(end, high + window - 1)
        if low < high and begin < end:
            yield Tile(
                sequences=sequences,
                queries=run.part(begin, end),
                keys=source.part(low, high),
                window=window,
                lag=begin - low,
            )
