"""The lanes that all units of one construction context share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shoal.fsdp.lane import Lane, lane_for


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """One lane for each direction."""

    gather: Lane
    """Weights on their way to the ranks."""

    reduce: Lane
    """Gradients on their way home."""

    @classmethod
    def on(cls, device: torch.device) -> Lanes:
        """Lanes for buffers on ``device``."""
        return cls(gather=lane_for(device), reduce=lane_for(device))
