"""The KV pool's bookkeeping: which block is whose, and which cached prefix is given up first.

A block is in one of three places:

    free ──allocate──> held ──release──> free       (a block without a name)
      ^                 │ ^
      │              release│share
      │                 v │
      └────evict───── cached                        (a block with a name)

Named blocks form a forest: a block's parent holds the tokens before it. Who holds a block holds
its ancestors too, so the cached blocks, which nobody holds, lie at the ends of the branches.
Eviction takes leaves only, the one that was released first, the lowest id among equals: the
prefix that many share outlives what grew from it, and no block is ever left without its parent.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence


class BlockPool:
    """Reference counts, names and eviction of ``num_blocks`` blocks; knows nothing of requests."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._holders = [0] * num_blocks
        self._names: list[bytes | None] = [None] * num_blocks
        self._parents: list[int | None] = [None] * num_blocks
        self._num_children = [0] * num_blocks
        self._released_at = [0] * num_blocks
        self._by_name: dict[bytes, int] = {}
        self._num_cached = 0
        self._leaves: list[tuple[int, int]] = []  # (released at, block); stale entries are skipped
        self._clock = 0

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds and that still have a name."""
        return self._num_cached

    @property
    def num_available(self) -> int:
        """Blocks that ``allocate`` can give: free and cached ones."""
        return len(self._free) + self._num_cached

    def is_named(self, block: int) -> bool:
        """Whether ``block`` can be found."""
        return self._names[block] is not None

    def find(self, name: bytes) -> int | None:
        """The block called ``name``."""
        return self._by_name.get(name)

    def match(self, names: Iterable[bytes]) -> list[int]:
        """Blocks of the longest known beginning of ``names``; nothing changes hands."""
        blocks: list[int] = []
        for name in names:
            block = self._by_name.get(name)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_reclaimable(self, blocks: Iterable[int]) -> int:
        """How many of ``blocks`` are cached, so that sharing them makes fewer available."""
        return sum(self._holders[block] == 0 for block in blocks)

    def allocate(self, count: int) -> list[int]:
        """Give ``count`` blocks without names, held once; evicts cached ones where it must.

        Ask ``num_available`` first: it is a mistake to ask for more.
        """
        assert count <= self.num_available, "the caller makes sure that there are enough"
        while len(self._free) < count:
            self._evict()
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._holders[block] = 1
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Hold named ``blocks`` once more; give them with all their ancestors."""
        for block in blocks:
            if self._holders[block] == 0:
                assert self._names[block] is not None, "a free block cannot be shared"
                self._num_cached -= 1
            self._holders[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Hold ``blocks`` once less; named ones that nobody holds any more stay as a cache."""
        self._clock += 1
        for block in blocks:
            assert self._holders[block] > 0, "nobody holds this block"
            self._holders[block] -= 1
            if self._holders[block] > 0:
                continue
            if self._names[block] is None:
                self._free.append(block)
            else:
                self._num_cached += 1
                self._released_at[block] = self._clock
        for block in blocks:
            self._note_leaf(block)

    def register(self, block: int, name: bytes, parent: int | None) -> None:
        """Call the held ``block`` ``name``; ``parent`` holds the tokens before it, if any do."""
        assert self._holders[block] > 0 and self._names[block] is None
        assert name not in self._by_name and (parent is None or self._names[parent] is not None)
        self._names[block] = name
        self._by_name[name] = block
        self._parents[block] = parent
        if parent is not None:
            self._num_children[parent] += 1

    def forget(self, block: int) -> None:
        """Take the name of ``block``, which has no children: what it holds is not to be found."""
        name = self._names[block]
        assert name is not None and self._num_children[block] == 0
        del self._by_name[name]
        self._names[block] = None
        parent = self._parents[block]
        self._parents[block] = None
        if self._holders[block] == 0:
            self._num_cached -= 1
            self._free.append(block)
        if parent is not None:
            self._num_children[parent] -= 1
            self._note_leaf(parent)

    def forget_cached(self) -> None:
        """Give up every cached block."""
        while self._num_cached:
            self._evict()

    def _is_leaf(self, block: int) -> bool:
        """Whether ``block`` is cached and nothing cached grew from it."""
        return (
            self._holders[block] == 0
            and self._names[block] is not None
            and self._num_children[block] == 0
        )

    def _note_leaf(self, block: int) -> None:
        if not self._is_leaf(block):
            return
        heapq.heappush(self._leaves, (self._released_at[block], block))
        if len(self._leaves) > 4 * self.num_blocks:
            # A prefix that is used again and again leaves a stale entry each time.
            self._leaves = sorted(
                (self._released_at[leaf], leaf)
                for leaf in range(self.num_blocks)
                if self._is_leaf(leaf)
            )

    def _evict(self) -> None:
        """Make the leaf that was released first a free block."""
        while True:
            released_at, block = heapq.heappop(self._leaves)
            # It may have been shared, and even released again, since this entry was made.
            if self._is_leaf(block) and self._released_at[block] == released_at:
                self.forget(block)
                return
