"""Data-parallel sharding of any module over flat buffers, one placement per mesh axis."""

from shoal.fsdp.buffer import FlatBuffer
from shoal.fsdp.communicator import Communicator, Pending
from shoal.fsdp.fully_shard import (
    CommunicatorFactory,
    fully_shard,
    fully_shard_context,
    microbatch,
)
from shoal.fsdp.group import ParameterGroup, group_of
from shoal.fsdp.inventory import (
    BytesAtRest,
    bytes_at_rest,
    is_sharded,
    sharded_parameters,
    sync_weights,
)
from shoal.fsdp.layout import GlobalLayout
from shoal.fsdp.ledger import Collective, Ledger
from shoal.fsdp.norm import clip_gradients, gradient_norm
from shoal.fsdp.optimizer import fully_shard_optimizer
from shoal.fsdp.placement import (
    Partial,
    Placement,
    Placements,
    Replicate,
    Shard,
    placements_for,
)
from shoal.fsdp.precision import MixedPrecision
from shoal.fsdp.reduction import Reduction
from shoal.fsdp.schedule import Schedule
from shoal.fsdp.sharded import ShardedParameter
from shoal.fsdp.share import Share
from shoal.fsdp.transport import Transport, bound_waits, communicator_for
from shoal.fsdp.whole import Matrix, deal, map_matrices, num_places

__all__ = [
    "BytesAtRest",
    "Collective",
    "Communicator",
    "CommunicatorFactory",
    "FlatBuffer",
    "GlobalLayout",
    "Ledger",
    "Matrix",
    "MixedPrecision",
    "ParameterGroup",
    "Partial",
    "Pending",
    "Placement",
    "Placements",
    "Reduction",
    "Replicate",
    "Schedule",
    "Shard",
    "ShardedParameter",
    "Share",
    "Transport",
    "bound_waits",
    "bytes_at_rest",
    "clip_gradients",
    "communicator_for",
    "deal",
    "fully_shard",
    "fully_shard_context",
    "fully_shard_optimizer",
    "gradient_norm",
    "group_of",
    "is_sharded",
    "map_matrices",
    "microbatch",
    "num_places",
    "placements_for",
    "sharded_parameters",
    "sync_weights",
]
