"""Which communicator serves an axis."""

from __future__ import annotations

import logging
from datetime import timedelta
from enum import Enum

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _set_pg_timeout

from shoal.fsdp.communicator import Communicator
from shoal.fsdp.gloo import GlooCommunicator
from shoal.fsdp.host import NotShared, join_host_memory
from shoal.fsdp.nccl import NcclCommunicator
from shoal.fsdp.shared_memory import SharedMemoryCommunicator

_logger = logging.getLogger(__name__)


class Transport(Enum):
    """A way between ranks whose buffers live in host memory; GPUs always use NCCL."""

    AUTO = "auto"
    """The fastest that all ranks of the axis can use."""

    GLOO = "gloo"
    """Sockets."""

    SHARED_MEMORY = "shared_memory"
    """Memory of one host."""


def communicator_for(
    group: ProcessGroup, device: torch.device, transport: Transport = Transport.AUTO
) -> Communicator:
    """The communicator for one mesh axis; called by every rank of ``group`` in the same order.

    ``device`` is where the buffers live. ``group`` gets the timeout of the default group, so that
    one setting bounds every wait for a peer that hangs.

    Raises:
        NotShared: where ranks that cannot share memory were told to.
        PeerLost: if another rank is lost meanwhile.
    """
    bound_waits(group, device)
    if device.type == "cuda":
        return NcclCommunicator(group, device)
    if group.size() == 1 or transport is Transport.GLOO:
        return GlooCommunicator(group)
    try:
        return SharedMemoryCommunicator(join_host_memory(group, _timeout_s(group, device)))
    except NotShared as reason:
        if transport is Transport.SHARED_MEMORY:
            raise
        if group.rank() == 0:
            _logger.warning("an axis of %d ranks uses sockets: %s", group.size(), reason)
        return GlooCommunicator(group)


def bound_waits(group: ProcessGroup, device: torch.device) -> None:
    """Give ``group`` the timeout of the default group, which new groups do not get by themselves.

    ``device`` is where the tensors are that travel in it.
    """
    _set_pg_timeout(timedelta(seconds=_timeout_s(_world(), device)), group)


def _world() -> ProcessGroup:
    world = dist.group.WORLD
    assert world is not None, "a group exists, so the default one does"
    return world


def _timeout_s(group: ProcessGroup, device: torch.device) -> float:
    """How long the group's collectives of tensors on ``device`` wait for a peer, in seconds."""
    timeout: timedelta = group._get_backend(device).options._timeout
    return timeout.total_seconds()
