"""Which sequences each step reads: one global order, the same for any number of ranks.

The order is that of epoch 0, then of epoch 1, and so on, each a permutation drawn from (seed,
epoch). A step takes the next ``global_batch`` ids, across the end of an epoch if need be;
``rank_share`` gives each rank its part. Nothing here knows how many ranks there are, so a run
continues at another size with exactly the ids that it would have read.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Self, TypeAlias

import numpy as np
import numpy.typing as npt

from shoal.data.permutation import permute
from shoal.errors import ConfigError, WorkError

logger = logging.getLogger(__name__)

SamplerState: TypeAlias = dict[str, int | bool | str]


class Sampler:
    """An iterator over the ids of each step, int64 [global_batch].

    It ends, for all ranks at the same step, when fewer than ``global_batch`` ids are left of
    ``epochs`` epochs; without ``epochs`` it never ends. ``fingerprint`` names the dataset, so that
    a state is not restored onto another one. ConfigError if ``epochs`` cannot fill one batch.
    """

    def __init__(
        self,
        num_sequences: int,
        global_batch: int,
        *,
        seed: int,
        fingerprint: str,
        shuffle: bool = True,
        epochs: int | None = None,
    ) -> None:
        if epochs is not None and epochs * num_sequences < global_batch:
            raise ConfigError(
                "train.global_batch",
                global_batch,
                f"{epochs} epoch(s) of {num_sequences} sequences cannot fill one batch",
                f"Set it to at most {epochs * num_sequences}, raise data.epochs or leave it unset, "
                "lower data.seq_len, or add data",
            )
        if global_batch > num_sequences:
            logger.info(
                "A batch of %d is more than the %d sequences of an epoch: it holds some twice",
                global_batch,
                num_sequences,
            )
        if epochs is not None and (left_over := epochs * num_sequences % global_batch):
            logger.info("The last %d sequences fill no batch and are not read", left_over)
        self._num_sequences = num_sequences
        self._global_batch = global_batch
        self._seed = seed
        self._shuffle = shuffle
        self._epochs = epochs
        self._fingerprint = fingerprint
        self._consumed = 0

    @property
    def consumed(self) -> int:
        """Sequences given out so far."""
        return self._consumed

    @property
    def batches_left(self) -> int | None:
        """Steps until the data ends; None if it never does."""
        if self._epochs is None:
            return None
        return (self._epochs * self._num_sequences - self._consumed) // self._global_batch

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> npt.NDArray[np.int64]:
        """Ids of the next step; StopIteration when the data has ended."""
        if self.batches_left is not None and self.batches_left <= 0:
            raise StopIteration
        places = np.arange(self._consumed, self._consumed + self._global_batch, dtype=np.int64)
        self._consumed += self._global_batch
        epochs, offsets = np.divmod(places, self._num_sequences)
        if not self._shuffle:
            return offsets
        for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
            inside = epochs == epoch
            offsets[inside] = permute(offsets[inside], self._num_sequences, (self._seed, epoch))
        return offsets

    def state_dict(self) -> SamplerState:
        """Everything that decides about the ids still to come, in plain values."""
        epoch, offset = divmod(self._consumed, self._num_sequences)
        return {
            "epoch": epoch,
            "offset": offset,
            "num_sequences": self._num_sequences,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "fingerprint": self._fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, int | bool | str]) -> None:
        """Go on where ``state`` was taken; the batch may have another size than then.

        ConfigError if it was taken of another dataset, seed or order; WorkError if it is damaged.
        """
        due = self.state_dict()
        if set(state) != set(due):
            raise WorkError(f"a sampler's state has the keys {sorted(due)}, not {sorted(state)}")
        if any(state[key] != due[key] for key in ("fingerprint", "num_sequences")):
            raise ConfigError(
                "data",
                f"{self._num_sequences} sequences",
                f"the checkpoint was trained on other data ({state['num_sequences']} sequences), "
                "whose order cannot be continued here",
                "Restore data.sources, data.tokenizer and data.seq_len, or start a new run",
            )
        for key, field in (("seed", "run.seed"), ("shuffle", "data.shuffle")):
            if state[key] != due[key]:
                raise ConfigError(
                    field,
                    due[key],
                    f"the checkpoint's order of the data was drawn with {state[key]!r}",
                    f"Set {field} to {state[key]!r}, or start a new run",
                )
        self._consumed = int(state["epoch"]) * self._num_sequences + int(state["offset"])


def rank_share(ids: npt.NDArray[np.int64], rank: int, size: int) -> npt.NDArray[np.int64]:
    """Give the part of a step's ``ids`` that data-parallel rank ``rank`` of ``size`` computes.

    Consecutive parts, disjoint and together all of ``ids``; ranks that share sequences (context,
    pipeline) pass the same ``rank``. ConfigError if the ids cannot be shared out equally.
    """
    if len(ids) % size:
        raise ConfigError(
            "train.global_batch",
            len(ids),
            f"{size} data-parallel ranks cannot share it equally",
            f"Use a multiple of {size}",
        )
    share = len(ids) // size
    return ids[rank * share : (rank + 1) * share]
