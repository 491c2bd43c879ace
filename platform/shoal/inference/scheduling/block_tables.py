"""Which blocks hold a sequence's tokens: admission, growth, sharing and release."""

from __future__ import annotations

from shoal.inference.limits import Limits
from shoal.inference.scheduling.block_pool import BlockPool
from shoal.inference.scheduling.hashing import ROOT_HASH, child_hash
from shoal.inference.scheduling.sequence import Sequence


class BlockTables:
    """Keeps ``Sequence.blocks`` and the pool in step.

    Full blocks are shared with whoever computed the same beginning before, under their names. A
    block is named when the step that fills it is planned: whoever is admitted to the same step
    may already attend to it (see ``Step``).
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.pool = BlockPool(limits.num_blocks)
        self._named: list[int] = []  # blocks that got their names in the step under way

    def begin_step(self) -> None:
        """Call before a step is planned."""
        self._named = []

    def admit(self, sequence: Sequence, headroom: int) -> bool:
        """Take ``sequence`` in with blocks for all of its known tokens, if they can be had.

        ``headroom`` blocks have to be left. Nothing happens if there is too little room.
        """
        size = self._limits.block_size
        # The last token is always computed, because its logits are what is missing.
        num_reusable = (len(sequence.tokens) - 1) // size
        if sequence.is_scoring:
            num_reusable = min(num_reusable, sequence.num_scored // size)
        shared = self.pool.match(self._names(sequence, num_reusable))
        num_new = self._limits.num_blocks_for(len(sequence.tokens)) - len(shared)
        if num_new + self.pool.num_reclaimable(shared) + headroom > self.pool.num_available:
            return False
        self.pool.share(shared)
        sequence.admit([*shared, *self.pool.allocate(num_new)], len(shared) * size)
        return True

    def has_room(self, sequence: Sequence) -> bool:
        """Whether the next token of ``sequence`` fits into the blocks that it has."""
        return sequence.num_computed < len(sequence.blocks) * self._limits.block_size

    def may_grow(self, sequence: Sequence) -> bool:
        """Whether ``sequence`` may still ask for a block."""
        num_tokens = sequence.num_prompt + sequence.max_tokens - 1
        return self._limits.num_blocks_for(num_tokens) > len(sequence.blocks)

    def grow(self, sequence: Sequence) -> None:
        """Give ``sequence`` a block more; the pool has one."""
        sequence.blocks += self.pool.allocate(1)

    def fill(self, sequence: Sequence, start: int, stop: int) -> tuple[int, ...]:
        """Give the blocks of the tokens before ``stop``, of which ``start`` on will be computed.

        Blocks that are full then get their names. One whose content exists already gets none:
        until the step is complete the sequence holds both, then it gives its own up
        (``settle``). So whoever holds a named block holds its ancestors.
        """
        size = self._limits.block_size
        names = self._names(sequence, stop // size)
        for at in range(start // size, stop // size):
            twin = self.pool.find(names[at])
            if twin is not None:
                self.pool.share([twin])
                sequence.twins[at] = twin
                continue
            parent = self.pool.find(names[at - 1]) if at else None
            self.pool.register(sequence.blocks[at], names[at], parent)
            self._named.append(sequence.blocks[at])
        return tuple(sequence.blocks[: self._limits.num_blocks_for(stop)])

    def settle(self, sequence: Sequence) -> None:
        """After its step: let ``sequence`` use the twins of its blocks instead of these."""
        for at, twin in sequence.twins.items():
            self.pool.release([sequence.blocks[at]])
            sequence.blocks[at] = twin
        sequence.twins.clear()

    def release(self, sequence: Sequence) -> None:
        """Take all blocks from ``sequence``; those with names stay as a cache, if there is one."""
        self.pool.release([*sequence.blocks, *sequence.twins.values()])
        if not self._limits.prefix_cache:
            self.pool.forget_cached()
        sequence.blocks = []
        sequence.twins.clear()

    def forget_step(self) -> None:
        """Take back the names that the step under way gave: its blocks were not computed."""
        for block in reversed(self._named):
            if self.pool.is_named(block):
                self.pool.forget(block)

    def _names(self, sequence: Sequence, count: int) -> list[bytes]:
        """Names of the first ``count`` blocks of ``sequence``, all of them full."""
        names, size = sequence.hashes, self._limits.block_size
        for at in range(len(names), count):
            parent = names[-1] if names else ROOT_HASH
            names.append(child_hash(parent, sequence.tokens[at * size : (at + 1) * size]))
        return names[:count]
