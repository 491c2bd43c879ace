"""Whether a checkpoint fits the model and the optimizer that are to be filled from it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from shoal.checkpoint.entry import Entry
from shoal.checkpoint.index import Stored, StoredBlob, StoredTensor
from shoal.errors import ConfigError
from shoal.storage import Location

logger = logging.getLogger(__name__)

NAMED_AT_MOST = 5
"""Keys that a message lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """One checkpoint's keys, to be held against what is wanted."""

    path: Location
    """Folder of the checkpoint."""

    stored: dict[str, Stored]
    """What is on the disk, by key."""

    stateless: Collection[str]
    """Parameters that were saved without optimizer state."""

    allow: Collection[str]
    """Patterns of keys that may be unread or missing."""

    def check(self, entries: Sequence[Entry], wanted: Iterable[str]) -> None:
        """Refuse what is missing for this rank, and what would have to change shape or kind."""
        stateless = {
            entry.key
            for entry in entries
            if entry.path[0] == "optimizer" and entry.path[1] in self.stateless
        }
        missing = {key for key in wanted if key not in self.stored} - stateless
        self._refuse(missing, "are wanted and not in it")
        for entry in entries:
            if entry.key in self.stored:
                self._check_entry(entry, self.stored[entry.key])

    def check_unread(self, read: Collection[str], *, with_optimizer: bool) -> None:
        """Refuse what no rank reads; ``read`` is what any rank does."""
        unread = {
            key
            for key in self.stored
            if key not in read
            and key != "counters"
            and not key.startswith("rng.")
            and (with_optimizer or not key.startswith("optimizer."))
        }
        self._refuse(unread, "are in it and would not be read")

    def unfit(self, problem: str, remedy: str) -> ConfigError:
        """What to raise where the checkpoint does not fit."""
        return ConfigError("checkpoint.resume", str(self.path), problem, remedy)

    def _refuse(self, keys: Iterable[str], problem: str) -> None:
        strange = {k for k in keys if not any(fnmatchcase(k, p) for p in self.allow)}
        if strange:
            raise self.unfit(
                f"{some(strange)} {problem}",
                "Resume with the model and optimizer that saved it, or name these keys in "
                "checkpoint.allow",
            )

    def _check_entry(self, entry: Entry, stored: Stored) -> None:
        if isinstance(stored, StoredBlob):
            raise self.unfit(f"{entry.key} is no tensor in it", "Load it with what saved it")
        if stored.shape != entry.shape:
            raise self.unfit(
                f"{entry.key} is {tuple(stored.shape)} in it and {tuple(entry.shape)} here",
                "Resume with the model that saved it",
            )
        if not _convertible(stored.dtype, entry.local.dtype):
            raise self.unfit(
                f"{entry.key} is {stored.dtype} in it and {entry.local.dtype} here",
                "Resume with the precision that saved it",
            )


def is_eight_bit(stored: Stored) -> bool:
    """Whether a tensor is stored in codes of 8 bits."""
    return isinstance(stored, StoredTensor) and stored.dtype == torch.uint8


def some(names: Iterable[str]) -> str:
    """The first few names and how many there are."""
    ordered = sorted(names)
    rest = len(ordered) - NAMED_AT_MOST
    return ", ".join(ordered[:NAMED_AT_MOST]) + (f" and {rest} more" if rest > 0 else "")


def _convertible(stored: torch.dtype, wanted: torch.dtype) -> bool:
    return stored == wanted or (stored.is_floating_point and wanted.is_floating_point)
