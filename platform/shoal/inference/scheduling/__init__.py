"""Who is computed next, with which blocks: no tensors, no clock, no random number."""

from shoal.inference.scheduling.block_pool import BlockPool
from shoal.inference.scheduling.hashing import ROOT_HASH, block_hashes, child_hash
from shoal.inference.scheduling.scheduler import Scheduler
from shoal.inference.scheduling.sequence import FinishReason, Sequence, State
from shoal.inference.scheduling.step import Chunk, Step

__all__ = [
    "BlockPool",
    "Chunk",
    "FinishReason",
    "ROOT_HASH",
    "Scheduler",
    "Sequence",
    "State",
    "Step",
    "block_hashes",
    "child_hash",
]
