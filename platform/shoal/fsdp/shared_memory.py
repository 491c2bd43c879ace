"""Collectives between ranks of one host, through memory that all of them map.

One copy of gathered weights serves all ranks, and a reduction reads the peers' partial results
where they lie. The sums are those of ``GlooCommunicator``, bit for bit.
"""

from __future__ import annotations

import os
import weakref

import torch

from shoal.fsdp.board import Board, Counter
from shoal.fsdp.communicator import SMALL_NUMEL, Counts, Pending
from shoal.fsdp.deed_queue import Deed, DeedQueue
from shoal.fsdp.deeds import (
    AllReduce,
    AllReduceAtOnce,
    AllToAll,
    GatherIntoBuffer,
    GatherThroughBlock,
    ReduceScatter,
)
from shoal.fsdp.host import HostMemory
from shoal.fsdp.lending import Block, Blocks, Input
from shoal.fsdp.memory_file import tensor_at
from shoal.fsdp.reduction import Reduction
from shoal.fsdp.staging import GatherBuffers

_GATHER_REGION = 1 << 30  # the board comes before
_BLOCK_REGION = 1 << 43


class SharedMemoryCommunicator:
    """A ``Communicator`` over memory that ``join_host_memory`` brought about."""

    def __init__(self, memory: HostMemory) -> None:
        self._size = memory.size
        self._rank = memory.rank
        self._file = memory.file
        self._queue = DeedQueue(memory.board, memory.rank, memory.size)
        self._buffers = GatherBuffers(memory.file, _GATHER_REGION, memory.board)
        self._blocks = Blocks(memory.file, _BLOCK_REGION, memory.rank, memory.size)
        self._lent: list[tuple[int, Block]] = []
        weakref.finalize(self, _leave, memory.board, os.getpid())

    @property
    def size(self) -> int:
        """See ``Communicator``."""
        return self._size

    @property
    def rank(self) -> int:
        """See ``Communicator``."""
        return self._rank

    @property
    def resident_bytes(self) -> int:
        """Memory that the axis shares at this moment, counted once for all its ranks."""
        return self._file.resident_bytes

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """See ``Communicator``."""
        self._queue.advance()
        return self._buffers.allocate(numel, dtype)

    def release(self, buffer: torch.Tensor) -> None:
        """See ``Communicator``."""
        self._buffers.release(buffer)
        self._queue.advance()

    def restore(self, buffer: torch.Tensor) -> None:
        """See ``Communicator``."""
        self._buffers.restore(buffer)
        self._queue.advance()

    def lend(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """See ``Communicator``."""
        block = self._blocks.take(numel * dtype.itemsize)
        board = self._queue.board
        self._queue.wait_for(lambda: board.lowest(Counter.FINISHED) >= block.free_after)
        tensor = block.part(self._rank, numel, dtype)
        self._lent.append((tensor.data_ptr(), block))
        return tensor

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor) -> Pending:
        """See ``Communicator``."""
        buffer = self._buffers.find(output)
        if buffer is None:
            where = Input(block=self._blocks.take(shard.numel() * shard.element_size()))
            deed = GatherThroughBlock(self._queue, where, output, shard)
            return self._start(deed, where.block)
        part = buffer.address + self._rank * buffer.nbytes // self._size
        own_part = tensor_at(part, shard.numel(), shard.dtype)
        after = self._buffers.prepare(buffer)
        return self._start(GatherIntoBuffer(self._queue, shard, own_part, after))

    def reduce_scatter(
        self, output: torch.Tensor, partial: torch.Tensor, reduction: Reduction
    ) -> Pending:
        """See ``Communicator``."""
        where = self._input(partial)
        deed = ReduceScatter(self._queue, where, output, partial, reduction)
        return self._start(deed, where.block)

    def all_reduce(
        self, output: torch.Tensor, partial: torch.Tensor, reduction: Reduction
    ) -> Pending:
        """See ``Communicator``."""
        where = self._input(partial)
        peers_read_output = where.lent and output.data_ptr() == partial.data_ptr()
        if not peers_read_output and (self._size == 2 or partial.numel() <= SMALL_NUMEL):
            at_once = AllReduceAtOnce(self._queue, where, output, partial, reduction)
            return self._start(at_once, where.block)
        part_numel = -(-partial.numel() // self._size)
        sums = self._blocks.take(part_numel * reduction.accumulate_dtype.itemsize)
        deed = AllReduce(self._queue, where, sums, output, partial, reduction)
        return self._start(deed, where.block, sums)

    def all_to_all(self, output: torch.Tensor, source: torch.Tensor, *, counts: Counts) -> Pending:
        """See ``Communicator``."""
        widest = max(sum(row) for row in counts)
        where = Input(block=self._blocks.take(widest * source.element_size()))
        deed = AllToAll(self._queue, where, output, source, counts)
        return self._start(deed, where.block)

    def _input(self, partial: torch.Tensor) -> Input:
        """Where the input of the next reduction lies, or will lie once published."""
        for index, (start, block) in enumerate(self._lent):
            offset = partial.data_ptr() - start
            if 0 <= offset < block.part_capacity:
                del self._lent[index]
                return Input(block=block, offset=offset, lent=True)
        return Input(block=self._blocks.take(partial.numel() * partial.element_size()))

    def _start(self, deed: Deed, *blocks: Block) -> Deed:
        for block in blocks:
            self._blocks.give_back(block, deed.sequence)
        self._queue.submit(deed)
        if blocks:
            self._blocks.trim(self._queue.board.lowest(Counter.FINISHED))
        return deed


def _leave(board: Board, pid: int) -> None:
    if os.getpid() == pid:  # and not a forked child, which ends with a copy of the communicator
        board.leave()
