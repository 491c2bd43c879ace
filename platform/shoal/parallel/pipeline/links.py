"""Messages between the stages of one pipeline.

    stage 0 ── activations ──► stage 1 ── activations ──► stage 2     next chunk, next stage
       ▲ ◄──── gradients ───────  ▲ ◄──── gradients ───────  │
       └──────────────────── activations ◄───────────────────┘        next chunk, first stage

Each kind of arrow has a process group of its own: then all messages of a group between two ranks
go one way, and no message waits behind one of the opposite direction, whatever the backend does to
keep their order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work

from shoal.errors import PeerLost
from shoal.fsdp import Ledger, bound_waits
from shoal.parallel.pipeline.stages import Stages
from shoal.parallel.pipeline.timeline import in_flight_limit
from shoal.topology import Axis, Topology


def messages_on_the_way(stages: Stages) -> int:
    """Most microbatches for which a link keeps what it sent.

    A stage takes all that it waits for before it begins more than this.
    """
    return in_flight_limit(stages, 0) + 1


class Cargo(StrEnum):
    """What travels."""

    ACTIVATION = "activation"
    GRADIENT = "gradient"


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """One tensor that a chunk hands to the next."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    has_gradient: bool
    """Whether its gradient travels back."""


class Receipt:
    """Tensors on their way to this rank."""

    def __init__(self, tensors: Sequence[torch.Tensor], works: Sequence[Work]) -> None:
        self._tensors = tuple(tensors)
        self._works = works

    def wait(self) -> tuple[torch.Tensor, ...]:
        """The tensors, once they are here; raises ``PeerLost`` if the sender was lost."""
        _finish(self._works)
        return self._tensors


class Links:
    """This rank's links to the other stages of its pipeline."""

    def __init__(
        self,
        topology: Topology,
        stages: Stages,
        device: torch.device,
        *,
        ledger: Ledger | None = None,
    ) -> None:
        """Every rank of the pipeline makes it, inside the default group; ``ledger`` records."""
        self._stages = stages
        self._device = device
        self._ledger = ledger
        self._rank = dist.get_rank()
        pipelines = topology.groups(Axis.PIPELINE)
        self._ranks = next(ranks for ranks in pipelines if self._rank in ranks)
        turns = (False, True) if stages.virtual > 1 else (False,)
        self._groups = {(cargo, turn): self._group(topology) for cargo in Cargo for turn in turns}
        self._sent: dict[ProcessGroup, deque[tuple[list[Work], list[torch.Tensor]]]] = {
            group: deque() for group in self._groups.values()
        }
        self._most_sent = messages_on_the_way(stages)

    def send(self, cargo: Cargo, source: int, target: int, tensors: Sequence[torch.Tensor]) -> None:
        """Begin to send tensors from a chunk of this stage to a neighbouring chunk."""
        self._send(self._lane(cargo, source, target), self._rank_of(target), tensors)

    def receive(
        self, cargo: Cargo, source: int, target: int, boundary: Sequence[Boundary]
    ) -> Receipt:
        """Begin to receive what ``send`` sends to a chunk of this stage."""
        tensors = [
            torch.empty(part.shape, dtype=part.dtype, device=self._device) for part in boundary
        ]
        return self._receive(self._lane(cargo, source, target), self._rank_of(source), tensors)

    def swap(self, tensor: torch.Tensor) -> torch.Tensor:
        """Exchange tensors of one shape between the first and the last stage, which both call it.

        Returns the other stage's, once this one has arrived there and may change. Raises
        ``PeerLost`` if the other was lost.
        """
        forth, back = self._groups[Cargo.ACTIVATION, False], self._groups[Cargo.GRADIENT, False]
        first, last = self._ranks[0], self._ranks[-1]
        away, peer = (forth, last) if self._rank == first else (back, first)
        receipt = self._receive(back if away is forth else forth, peer, [torch.empty_like(tensor)])
        self._send(away, peer, [tensor])
        (other,) = receipt.wait()
        self.finish()
        return other

    def finish(self) -> None:
        """Wait until everything that was sent has arrived."""
        for sent in self._sent.values():
            while sent:
                _finish(sent.popleft()[0])

    def _send(self, group: ProcessGroup, peer: int, tensors: Sequence[torch.Tensor]) -> None:
        whole = [tensor.detach().contiguous() for tensor in tensors]
        works = [_started(dist.isend(tensor, peer, group=group)) for tensor in whole]
        if self._ledger is not None:
            for tensor in whole:
                self._ledger.sent(self._rank, peer, tensor)
        sent = self._sent[group]
        sent.append((works, whole))
        while len(sent) > self._most_sent:
            _finish(sent.popleft()[0])

    def _receive(self, group: ProcessGroup, peer: int, tensors: Sequence[torch.Tensor]) -> Receipt:
        return Receipt(tensors, [_started(dist.irecv(t, peer, group=group)) for t in tensors])

    def _group(self, topology: Topology) -> ProcessGroup:
        group = topology.process_group(Axis.PIPELINE)
        bound_waits(group, self._device)
        return group

    def _lane(self, cargo: Cargo, source: int, target: int) -> ProcessGroup:
        lower, upper = sorted((source, target))
        return self._groups[cargo, self._stages.stage_of(upper) == 0]

    def _rank_of(self, chunk: int) -> int:
        return self._ranks[self._stages.stage_of(chunk)]


def _started(work: Work | None) -> Work:
    assert work is not None, "this rank belongs to the group"
    return work


def _finish(works: Sequence[Work]) -> None:
    try:
        for work in works:
            work.wait()
    except RuntimeError as error:
        raise PeerLost(
            f"A message between stages failed, so another rank was lost or does not answer: {error}"
        ) from error
