"""A step as the model sees it: rows of tokens, with their places in the KV cache.

T rows, S sequences. Built with numpy in one go, because at few sequences and a small model the
Python around the kernels is what a step costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from shoal.inference.scheduling.step import Chunk


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """What the model computes in one go. A row's bits depend on itself and its past alone."""

    tokens: torch.Tensor
    """``[T]`` int64: token ids."""

    positions: torch.Tensor
    """``[T]`` int32: places in their sequences, from 0."""

    sequences: torch.Tensor
    """``[T]`` int32: rows of ``block_tables``."""

    slots: torch.Tensor
    """``[T]`` int64: where in the cache each row's keys and values go."""

    block_tables: torch.Tensor
    """``[S, most blocks]`` int32: blocks of each sequence in the order of its tokens."""

    @staticmethod
    def zeros(num_rows: int, table_width: int) -> Rows:
        """Rows of as many sequences, to be filled."""
        return Rows(
            tokens=torch.zeros(num_rows, dtype=torch.int64),
            positions=torch.zeros(num_rows, dtype=torch.int32),
            sequences=torch.zeros(num_rows, dtype=torch.int32),
            slots=torch.zeros(num_rows, dtype=torch.int64),
            block_tables=torch.zeros(num_rows, table_width, dtype=torch.int32),
        )

    def fill(self, other: Rows) -> None:
        """Take over the values of ``other``, which has as many rows and no wider tables."""
        self.tokens.copy_(other.tokens)
        self.positions.copy_(other.positions)
        self.sequences.copy_(other.sequences)
        self.slots.copy_(other.slots)
        num_sequences, width = other.block_tables.shape
        self.block_tables[:num_sequences, :width].copy_(other.block_tables)

    @staticmethod
    def of(chunks: Sequence[Chunk], block_size: int) -> Rows:
        """The rows of ``chunks``, chunk after chunk."""
        counts = np.fromiter((chunk.count for chunk in chunks), np.int64, len(chunks))
        starts = np.fromiter((chunk.start for chunk in chunks), np.int64, len(chunks))
        first_rows = np.cumsum(counts) - counts
        total = int(counts.sum())
        tables = np.zeros((len(chunks), max(len(chunk.blocks) for chunk in chunks)), np.int32)
        for table, chunk in zip(tables, chunks, strict=True):
            table[: len(chunk.blocks)] = chunk.blocks
        sequences = np.repeat(np.arange(len(chunks)), counts)
        positions = np.arange(total) + np.repeat(starts - first_rows, counts)
        blocks = tables[sequences, positions // block_size].astype(np.int64)
        tokens = chain.from_iterable(chunk.tokens for chunk in chunks)
        return Rows(
            tokens=torch.from_numpy(np.fromiter(tokens, np.int64, total)),
            positions=torch.from_numpy(positions.astype(np.int32)),
            sequences=torch.from_numpy(sequences.astype(np.int32)),
            slots=torch.from_numpy(blocks * block_size + positions % block_size),
            block_tables=torch.from_numpy(tables),
        )
