"""Which communicator serves an axis."""

from __future__ import annotations

import torch
from torch.distributed import ProcessGroup

from shoal.fsdp.communicator import Communicator
from shoal.fsdp.gloo import GlooCommunicator


def communicator_for(group: ProcessGroup, device: torch.device) -> Communicator:
    """The communicator for one mesh axis; called by every rank of ``group`` in the same order.

    ``device`` is where the buffers live.
    """
    if device.type != "cpu":
        raise NotImplementedError(f"no communicator for {device.type} buffers")
    return GlooCommunicator(group)
