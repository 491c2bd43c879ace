"""The one seam to collectives: everything the adapter sends passes through a ``Communicator``.

A communicator serves one axis of a mesh and works on flat, contiguous, one-dimensional buffers.
Each deed returns at once with a ``Pending``; the result may be used, and the inputs reused, after
its ``wait()``. Every rank of the axis makes the same calls (but ``wait``) in the same order with
the same sizes, in an all-to-all with the same counts; when it waits for each is its own affair.

Sums are those of ``Reduction``, in rank order 0..n-1, so their bits do not depend on the transport
(but for NCCL, which keeps its own order).
No implementation averages by a collective: an average is a sum divided afterwards, here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from shoal.fsdp.memory import Memory
from shoal.fsdp.reduction import Reduction

Counts = Sequence[Sequence[int]]
"""How many elements of an all-to-all go from each rank (first index) to each rank (second)."""

SMALL_NUMEL = 1 << 14
"""Up to here the latency of a second collective costs more than sending everything to everyone."""


class Pending(Protocol):
    """A deed under way."""

    def wait(self) -> None:
        """Return when the result is in place on the current stream.

        Raises ``PeerLost`` if a peer was lost. Later calls return at once.
        """


class Communicator(Memory, Protocol):
    """Collectives over the ranks of one mesh axis, and memory for what they move."""

    @property
    def size(self) -> int:
        """Ranks on the axis."""

    @property
    def rank(self) -> int:
        """This rank's place on the axis."""

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor) -> Pending:
        """Fill ``output`` (size * numel) with every rank's ``shard`` (numel) in rank order.

        ``shard`` lies elsewhere: peers may still be reading what ``output`` held before.
        """

    def reduce_scatter(
        self, output: torch.Tensor, partial: torch.Tensor, reduction: Reduction
    ) -> Pending:
        """Sum every rank's ``partial`` (size * numel) and keep this rank's part.

        What becomes of the sum on its way into ``output`` (numel), which may be this rank's own
        part of ``partial``, is for ``reduction`` to say.
        """

    def all_reduce(
        self, output: torch.Tensor, partial: torch.Tensor, reduction: Reduction
    ) -> Pending:
        """Like ``reduce_scatter``, but every rank gets the whole sum (numel) in ``output``.

        ``output`` may be ``partial`` itself; any numel will do.
        """

    def all_to_all(self, output: torch.Tensor, source: torch.Tensor, *, counts: Counts) -> Pending:
        """Send each rank its part of ``source`` and fill ``output`` with the parts for this one.

        Every rank gives all the ``counts``, the same ones; parts may be empty. ``source`` holds its
        parts in the order of the ranks that they are for, ``output`` its own in the order of those
        that they come from.
        """
