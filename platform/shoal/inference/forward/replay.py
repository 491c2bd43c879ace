"""Forward passes of few rows, recorded once for each number of rows and run again from then on.

A decode step of T sequences is the same launches of kernels every time, so that the Python between
them, a fifth to a half of a small model's step, is needed but once. The bits are those of the pass
that was recorded: it is the same kernels on the same addresses.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from shoal.inference.forward.model import ServedModel
from shoal.inference.forward.rows import Rows
from shoal.ops import fixed

logger = logging.getLogger(__name__)

_MOST_ROWS = 64
"""Rows of the largest pass that is recorded: beyond them, kernels outweigh the Python by far."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Recorded:
    program: fixed.Program
    rows: Rows
    """Where the program finds its inputs."""
    hidden: torch.Tensor
    """Where it leaves the head's input."""


class Replays:
    """Recorded passes of one model over one cache."""

    def __init__(self, model: ServedModel, cache: fixed.KVCache) -> None:
        self._model = model
        self._cache = cache
        self._arena = fixed.Arena()
        self._recorded: dict[tuple[int, int], _Recorded] = {}
        self._table_width = -(-model.config.max_position_embeddings // cache.block_size)
        # Products of torch's own are not ours to record.
        self._records = model.is_batch_invariant

    def forward(self, rows: Rows) -> torch.Tensor | None:
        """What ``ServedModel.forward`` gives for all of ``rows``; None if it was not computed.

        The result is overwritten by the next pass of as many rows.
        """
        num_rows = rows.tokens.shape[0]
        if not self._records or num_rows > _MOST_ROWS:
            return None
        key = num_rows, torch.get_num_threads()
        recorded = self._recorded.get(key)
        if recorded is None:
            recorded = self._record(rows)
            if recorded is not None:
                self._recorded[key] = recorded
            return None if recorded is None else recorded.hidden
        recorded.rows.fill(rows)
        recorded.program.run()
        return recorded.hidden

    def _record(self, rows: Rows) -> _Recorded | None:
        places = Rows.zeros(rows.tokens.shape[0], self._table_width)
        places.fill(rows)
        try:
            with fixed.recording(self._arena) as program:
                hidden = self._model.forward(places, self._cache)
        except fixed.CannotRecord as error:
            logger.info("steps are computed without recordings: %s", error)
            self._records = False
            return None
        return _Recorded(program=program, rows=places, hidden=hidden)
