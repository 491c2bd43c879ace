"""How keys and values come to the queries of other ranks, and their gradients back.

Each rank holds the keys and values of its own tokens, ``[2, B, L, heads, D]``: keys first, L the
most tokens that a rank has, with a last row of no meaning on ranks that have one token less.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from shoal.parallel.context.cut import Run


@dataclass(frozen=True, kw_only=True, slots=True)
class Visit:
    """Keys and values that are here for a while."""

    runs: Sequence[Run]
    """Which positions they are of, and where in dimension 2 those lie."""

    tensor: torch.Tensor
    """``[2, B, tokens, heads, D]``."""

    gradient: torch.Tensor
    """The like, in fp32 at least, zero at first, for what this visit adds; empty in forward."""


class Exchange(Protocol):
    """A way of keys and values through the ranks of a context group.

    Every rank goes through all visits, in step with the others: each of them is a collective.
    """

    def visits(self, own: torch.Tensor) -> Iterator[Visit]:
        """Everyone's keys and values, each token's in one visit. ``own`` are this rank's."""

    def visits_with_gradients(self, own: torch.Tensor, gradient: torch.Tensor) -> Iterator[Visit]:
        """The same visits, each of which takes gradients.

        After the last, ``gradient``, like ``own``, holds the sum of what all ranks added for this
        rank's tokens; the sum is taken in fp32 at least and always in the same order.
        """


def wide(dtype: torch.dtype) -> torch.dtype:
    """The format that sums are taken in."""
    return torch.promote_types(dtype, torch.float32)
