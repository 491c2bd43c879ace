"""The way of a layer's rows to the ranks that hold their experts, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shoal import ops
from shoal.fsdp import Communicator
from shoal.fsdp.communicator import Counts
from shoal.parallel.expert.degree import check_expert_degree
from shoal.parallel.expert.travel import transposed, travel


class ExpertExchange:
    """The way between tokens and experts for the layers of one model.

    Exchanges are made in the order of the calls, which must be the same on every rank of the group.
    """

    def __init__(self, num_experts: int, communicator: Communicator | None) -> None:
        """``communicator`` joins the ranks that share the experts; None where each has them all.

        Raises ``ConfigError`` for ranks that cannot hold equally many.
        """
        self._communicator = communicator
        self.num_experts = num_experts
        self.size = 1 if communicator is None else communicator.size
        """Ranks that share the experts."""
        self.rank = 0 if communicator is None else communicator.rank
        """This rank's place among them."""
        check_expert_degree(num_experts, self.size)

    def route(self, sizes: Sequence[int], device: torch.device) -> Route:
        """Agree on the way of rows of which each expert gets ``sizes``, E numbers on every rank."""
        by_rank = self._gather(sizes, device)
        held = self.num_experts // self.size
        sent = [
            [sum(row[first : first + held]) for first in range(0, self.num_experts, held)]
            for row in by_rank
        ]
        first = self.rank * held
        received = [row[first : first + held] for row in by_rank]
        order, inverse = _by_expert(received, device)
        return Route(
            communicator=self._communicator,
            sent=sent,
            sizes=tuple(map(sum, zip(*received, strict=True))),
            order=order,
            inverse=inverse,
        )

    def _gather(self, sizes: Sequence[int], device: torch.device) -> list[list[int]]:
        """The sizes of every rank."""
        own = torch.tensor(sizes, device=device)
        if self._communicator is None:
            return [own.tolist()]
        everyones = own.new_empty(self.size * self.num_experts)
        self._communicator.all_gather(everyones, own).wait()
        table: list[list[int]] = everyones.view(self.size, self.num_experts).tolist()
        return table


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The way of one layer's rows to the experts and back."""

    communicator: Communicator | None

    sent: Counts
    """Rows that go from each rank (first index) to each rank (second)."""

    sizes: tuple[int, ...]
    """Rows of each expert held here."""

    order: torch.Tensor
    """``[R]``: place in the order by expert to place in the order of arrival."""

    inverse: torch.Tensor
    """``[R]``: the other way."""

    def to_experts(self, rows: torch.Tensor) -> torch.Tensor:
        """This rank's rows by expert, ``[T * k, H]``, for the rows of the experts here, ``[R, H]``.

        Differentiable, as is ``to_tokens``: gradients take the opposite way.
        """
        if self.communicator is None:
            return rows
        arrived = travel(rows, self.communicator, self.sent)
        return ops.permute(arrived, self.order, self.inverse)

    def to_tokens(self, rows: torch.Tensor) -> torch.Tensor:
        """What experts made of the rows here, ``[R, H]``, for what became of this rank's own."""
        if self.communicator is None:
            return rows
        leaving = ops.permute(rows, self.inverse, self.order)
        return travel(leaving, self.communicator, transposed(self.sent))


def _by_expert(
    received: Sequence[Sequence[int]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """The permutation from the order of arrival to the order by expert, and its inverse.

    ``received`` has a row for each rank and a column for each expert held here.
    """
    lengths = torch.tensor(received, device=device)
    num_rows = sum(map(sum, received))
    starts = (lengths.flatten().cumsum(0) - lengths.flatten()).view_as(lengths)
    runs = lengths.t().flatten()
    shifts = starts.t().flatten() - (runs.cumsum(0) - runs)
    places = torch.arange(num_rows, device=device)
    order = places + shifts.repeat_interleave(runs, output_size=num_rows)
    inverse = torch.empty_like(order)
    inverse[order] = places
    return order, inverse
