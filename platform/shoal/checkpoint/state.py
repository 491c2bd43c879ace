"""What a save is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from shoal.storage import Location


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A run's state at one moment, as one rank holds it."""

    model: nn.Module
    """Its weights must stay as they are until the save has copied or written them."""

    optimizer: torch.optim.Optimizer | None
    """Its moments must too. Settings such as learning rates are not saved: they follow from the
    configuration and the counters."""

    counters: Mapping[str, object]
    """Plain values (numbers, texts, containers, tensors), equal on every rank."""

    rng: Mapping[str, torch.Tensor] | None = None
    """This rank's, from ``capture_rng``."""

    attachments: Mapping[str, Location | bytes] = field(default_factory=dict)
    """Contents or files to copy, by name in the checkpoint's ``attachments`` folder; the first
    rank's are taken."""
