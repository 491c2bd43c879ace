"""Looking vectors up in a table."""

from __future__ import annotations

import torch
from torch.nn import functional

from shoal.ops.replaceable import replaceable


@replaceable
def embed(tokens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rows ``tokens`` ``[...]`` int64 of ``table`` ``[V, H]``: ``[..., H]``."""
    return functional.embedding(tokens, table)
