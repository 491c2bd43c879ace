"""How long and in which pieces the model is trained."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from shoal.config.guard import GuardSettings
from shoal.config.section import Section


class TrainSettings(Section):
    """``train``: steps, batches and the memory-for-time trades; batches count sequences."""

    steps: int = Field(ge=1)
    """Optimizer steps of the whole run."""

    global_batch: int | None = Field(default=None, ge=1, le=2**24)
    """Sequences per step over all ranks; unset: one microbatch on each data-parallel rank."""

    micro_batch: int = Field(default=1, ge=1, le=2**24)
    """Sequences that one rank computes at a time."""

    recompute: Literal["none", "layer"] = "none"
    """``layer`` keeps only each layer's input and computes the rest again in backward."""

    cuda_graph: bool = False
    """Capture the whole iteration as one CUDA graph; refused, because it is not built yet."""

    deterministic: bool = True
    """Refuse kernels whose result may differ from run to run."""

    guard: GuardSettings = GuardSettings()
    """Steps that would spoil the weights."""
