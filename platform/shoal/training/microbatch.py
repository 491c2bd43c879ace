"""A microbatch as the model takes it, made of a batch before the step begins."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shoal import ops
from shoal.data import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """Tensors on the model's device, and what of them decides which kernels run."""

    batch: Batch
    """On the device."""

    spans: ops.DocumentSpans | None
    """Where its documents lie; read from the batch while that was on the host."""

    @staticmethod
    def of(batch: Batch, device: torch.device) -> Microbatch:
        """Prepare a batch that lies on the host."""
        return Microbatch(batch=batch.to(device), spans=ops.DocumentSpans.of(batch.documents))
