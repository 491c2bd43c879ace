"""Which communicator serves an axis."""

from __future__ import annotations

import logging
from enum import Enum

import torch
from torch.distributed import ProcessGroup

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

    ``device`` is where the buffers live. A transport that was asked for by name and is not to be
    had raises ``NotShared``; the choice of ``AUTO`` is logged.
    """
    if device.type == "cuda":
        return NcclCommunicator(group, device)
    if group.size() == 1 or transport is Transport.GLOO:
        return GlooCommunicator(group)
    try:
        return SharedMemoryCommunicator(join_host_memory(group))
    except NotShared as reason:
        if transport is Transport.SHARED_MEMORY:
            raise
        if group.rank() == 0:
            _logger.warning("an axis of %d ranks uses sockets: %s", group.size(), reason)
        return GlooCommunicator(group)
