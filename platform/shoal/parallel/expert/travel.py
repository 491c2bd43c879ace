"""Rows on their way between ranks, and their gradients on the way back."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from shoal.fsdp import Communicator
from shoal.fsdp.communicator import Counts


def travel(rows: torch.Tensor, communicator: Communicator, counts: Counts) -> torch.Tensor:
    """Send each rank its part of ``rows`` ``[R, H]``; the parts for this rank, in rank order.

    ``counts`` are rows from each rank (first index) to each (second). Differentiable; every rank
    calls it, forward and backward.
    """
    arrived: torch.Tensor = _AllToAll.apply(rows, communicator, counts)  # type: ignore[no-untyped-call]
    return arrived


def transposed(counts: Counts) -> list[list[int]]:
    """The counts of the way back."""
    return [list(column) for column in zip(*counts, strict=True)]


class _AllToAll(torch.autograd.Function):
    """Rows to the ranks that they are for; their gradients come back the same way."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, communicator: Communicator, counts: Counts
    ) -> torch.Tensor:
        ctx.communicator, ctx.counts = communicator, counts
        return _all_to_all(rows, communicator, counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _all_to_all(gradient, ctx.communicator, transposed(ctx.counts)), None, None


def _all_to_all(rows: torch.Tensor, communicator: Communicator, counts: Counts) -> torch.Tensor:
    width = rows.shape[1]
    arriving = sum(row[communicator.rank] for row in counts)
    output = rows.new_empty(arriving, width)
    elements = [[count * width for count in row] for row in counts]
    source = rows.contiguous().view(-1)
    communicator.all_to_all(output.view(-1), source, counts=elements).wait()
    return output
