"""The embedding table."""

from __future__ import annotations

import torch
from torch import nn

from shoal import ops


class Embedding(nn.Module):
    """A vector for each token; the values are left to whoever fills the model.

    Every row is trained. (``transformers`` gives the row of ``pad_token_id`` no gradient as an
    input; packed sequences hold no padding, and several models pad with their end-of-text token.)
    """

    def __init__(self, vocabulary: int, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocabulary, hidden, dtype=dtype))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``[...]`` int64 to ``[..., H]``."""
        return ops.embed(tokens, self.weight)
