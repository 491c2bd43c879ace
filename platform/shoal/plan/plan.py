"""What a run will look like, known before it starts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from shoal.config import AxisLevels
from shoal.plan.batches import Batches
from shoal.plan.links import LinkClass, link_of, sent_by_link
from shoal.plan.memory import AT_REST, RankMemory
from shoal.plan.precision import Precision
from shoal.plan.rates import Rates
from shoal.plan.saves import Saves
from shoal.plan.step_time import StepTime
from shoal.plan.traffic import Traffic
from shoal.topology import Axis, Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Ranks, memory and traffic of one run; ``make_plan`` makes it."""

    name: str
    """Name of the run."""

    model_type: str
    num_parameters: int
    has_experts: bool

    device: str
    """``cpu`` or ``cuda``."""

    precision: Precision
    topology: Topology
    batches: Batches

    levels: dict[str, AxisLevels]
    """Levels of sharding of ``dense`` and ``expert`` layers."""

    recompute: str
    """``layer`` where layers are computed again in backward, else ``none``."""

    layers: tuple[tuple[range, ...], ...]
    """Layers of each pipeline stage; several runs of them where it has virtual stages."""

    bubble_share: float
    """Share of the step in which a stage waits for others, if all layers take as long."""

    memory: tuple[RankMemory, ...]
    """Bytes of every rank, by rank."""

    saves: Saves | None
    """What checkpoints take; None in the plans that a search compares."""

    traffic: tuple[Traffic, ...]
    """Collectives and messages of one step, the same on every rank of a stage."""

    rates: Rates | None
    """What the time is estimated from; None where nobody said."""
    time: StepTime | None
    """How long a step takes."""

    @property
    def fullest(self) -> RankMemory:
        """The rank that needs the most memory."""
        return max(self.memory, key=lambda memory: memory.peak)

    @property
    def memory_bytes(self) -> int | None:
        """Memory that a step may fill on each device; None where nobody said."""
        return None if self.rates is None else self.rates.memory_bytes

    @property
    def fits(self) -> bool:
        """Whether the fullest rank stays below that memory, as far as it is known."""
        return self.memory_bytes is None or self.fullest.peak <= self.memory_bytes

    @property
    def sent(self) -> tuple[dict[LinkClass, int], ...]:
        """By stage, bytes that each of its ranks sends in a step inside domains and outside."""
        return tuple(
            sent_by_link((one for one in self.traffic if one.stream.stage == stage), self.topology)
            for stage in range(self.topology.pipeline)
        )

    @property
    def domains(self) -> tuple[range, ...]:
        """The ranks of each domain of fast links."""
        size = self.topology.domain
        return tuple(range(first, first + size) for first in range(0, len(self.memory), size))

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        precision = {name: str(value) for name, value in asdict(self.precision).items()}
        return {
            "name": self.name,
            "model": {"model_type": self.model_type, "parameters": self.num_parameters},
            "device": self.device,
            "precision": precision,
            "mesh": {
                "world_size": self.topology.world_size,
                "domains": self.topology.num_domains,
                **{axis.value: self.topology.size(axis) for axis in Axis},
            },
            "sharding": {
                kind: levels.model_dump(mode="json") for kind, levels in self.levels.items()
            },
            "pipeline": {
                "layers": [[list(layers) for layers in runs] for runs in self.layers],
                "bubble_share": self.bubble_share,
            },
            "batches": {**asdict(self.batches), "tokens": self.batches.tokens},
            "ranks": [
                {
                    "rank": memory.rank,
                    **asdict(self.topology.coordinates(memory.rank)),
                    "at_rest_bytes": memory.at_rest,
                    "peak_bytes": memory.peak,
                    "bytes": {kind.value: size for kind, size in memory.num_bytes.items()},
                }
                for memory in self.memory
            ],
            "checkpoint": None if self.saves is None else self._checkpoint(self.saves),
            "time": None
            if self.time is None or self.rates is None
            else {**self.time.as_dict(), "rates": self.rates.as_dict()},
            "links": [dict(sent) for sent in self.sent],
            "at_rest_kinds": [kind.value for kind in AT_REST],
            "collectives": [
                {
                    **asdict(traffic.stream),
                    "link": link_of(traffic.stream, self.topology),
                    "count": traffic.count,
                    "payload_bytes": traffic.payload_bytes,
                    "sent_bytes": traffic.sent_bytes,
                }
                for traffic in self.traffic
            ],
        }

    def _checkpoint(self, saves: Saves) -> dict[str, Any]:
        return {
            "bytes": saves.num_bytes,
            "copies": saves.num_copies,
            "ranks": [
                {"rank": rank, "bytes": size, "copy_bytes": saves.copy_bytes([rank])}
                for rank, size in enumerate(saves.file_bytes)
            ],
            "domains": [
                {"domain": number, "copy_bytes": saves.copy_bytes(ranks)}
                for number, ranks in enumerate(self.domains)
            ],
        }
