"""Which engine takes a request: the one that has computed how its prompt begins, unless it is busy.

    score = share of the prompt's blocks that the engine has seen
            - weight * (load - mean load) / max(1, mean load)

The highest score wins, among equals the lower load. A prompt that nobody has seen goes to the least
loaded. Among those equal in this as well, the beginning of the prompt says where to look first: a
burst of prompts that comes through many frontends is spread, and all that begin alike meet.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.inference.scheduling.hashing import ROOT_HASH, block_hashes, child_hash

LOAD_WEIGHT = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """One engine that takes requests."""

    place: int
    """Which one it is."""

    sequences: int
    """Choices that it has under way or in its queue."""


class Router:
    """Remembers, for each engine, the ``capacity`` prompt blocks that it was last sent."""

    def __init__(self, capacity: int = 65_536) -> None:
        self._capacity = capacity
        self._seen: dict[int, OrderedDict[bytes, None]] = {}

    def names(self, prompt: Sequence[int], block_size: int) -> list[bytes]:
        """Names of the blocks, of ``block_size`` tokens, of ``prompt`` that an engine may share.

        The last token is always computed, so a block that it completes is not among them.
        """
        return block_hashes(prompt[:-1], block_size)

    def start(self, prompt: Sequence[int], block_size: int) -> int:
        """A number that is the same for all prompts with this first block."""
        return int.from_bytes(child_hash(ROOT_HASH, prompt[:block_size])[:8])

    def ranked(self, names: Sequence[bytes], loads: Sequence[Load], start: int = 0) -> list[int]:
        """Places of all ``loads``, best first; those that are equal go around from ``start``."""
        mean = sum(load.sequences for load in loads) / max(1, len(loads))
        depths = {load.place: self._depth(names, load.place) for load in loads}
        has_match = any(depths.values())
        turns = {load.place: (at - start) % len(loads) for at, load in enumerate(loads)}

        def key(load: Load) -> tuple[float, int, int]:
            if not has_match:
                return (0.0, load.sequences, turns[load.place])
            excess = (load.sequences - mean) / max(1.0, mean)
            score = depths[load.place] / len(names) - LOAD_WEIGHT * excess
            return (-score, load.sequences, turns[load.place])

        return [load.place for load in sorted(loads, key=key)]

    def note(self, names: Sequence[bytes], place: int) -> None:
        """Remember that the engine at ``place`` was sent these blocks."""
        seen = self._seen.setdefault(place, OrderedDict())
        # The first blocks last, to be forgotten last: without them the rest is of no use.
        for name in reversed(names):
            seen[name] = None
            seen.move_to_end(name)
        while len(seen) > self._capacity:
            seen.popitem(last=False)

    def forget(self, place: int) -> None:
        """The engine at ``place`` starts anew."""
        self._seen.pop(place, None)

    def _depth(self, names: Sequence[bytes], place: int) -> int:
        seen: Mapping[bytes, None] = self._seen.get(place, OrderedDict())
        for depth, name in enumerate(names):
            if name not in seen:
                return depth
        return len(names)
