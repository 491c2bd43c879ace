"""What one rank holds of one parameter: the seam to checkpoints, weights and optimizers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedParameter:
    """Contiguous dim-0 rows of one parameter, as this rank's optimizer sees them.

    The same parameters come in the same order on every rank, also where a rank holds no row.
    """

    names: tuple[str, ...]
    """Full names in the model; tied weights have several, the first is the canonical one."""

    shape: torch.Size
    """Shape of the whole parameter."""

    row_start: int
    """First dim-0 row held here."""

    local: nn.Parameter
    """Main weights of the rows held here, ``[rows, *shape[1:]]``; may have no rows.

    A view of the group's flat shard.
    """

    primary: bool
    """Whether this rank stands for the rows; of ranks with equal replicas exactly one does."""

    replica: int = 0
    """Which of the ranks with equal replicas this is; 0 is the primary one."""

    num_replicas: int = 1
    """How many these are. 1 without being primary is a copy for which another unit stands."""

    @property
    def name(self) -> str:
        """The canonical name."""
        return self.names[0]

    @property
    def row_stop(self) -> int:
        """One past the last dim-0 row held here."""
        return self.row_start + self.local.shape[0]
