"""The output head: logits, and the log-probabilities of given tokens."""

from __future__ import annotations

import torch

from shoal.ops.cross_entropy import CHUNK_BYTES, IGNORED
from shoal.ops.linear import linear
from shoal.ops.replaceable import replaceable


@replaceable
def logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``hidden @ weight.T``: ``[..., H]`` and ``[V, H]`` give ``[..., V]``, in one dtype."""
    return linear(hidden, weight)


@replaceable
def token_log_probabilities(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    """``log softmax(hidden @ weight.T)[label]`` of each row: ``[T]`` fp32.

    ``hidden`` is ``[T, H]``, ``weight`` ``[V, H]``, ``labels`` ``[T]`` int64; rows labelled
    ``IGNORED`` give 0. Logits are made for so many rows at a time that they take 64 MiB.
    """
    step = max(CHUNK_BYTES // (4 * weight.shape[0]), 1)
    parts = []
    for start in range(0, hidden.shape[0], step):
        rows, targets = linear(hidden[start : start + step], weight), labels[start : start + step]
        kept = targets != IGNORED
        index = targets.where(kept, 0).unsqueeze(1)
        parts.append(rows.float().log_softmax(dim=1).gather(1, index).squeeze(1) * kept)
    return torch.cat(parts) if parts else hidden.new_zeros(0, dtype=torch.float32)
