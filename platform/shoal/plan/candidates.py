"""The layouts that a search looks at, and why others are none.

Degrees are powers of two, as clusters are. Of sharding those pairs of levels are looked at that
have names (docs/fsdp.md), for experts also full sharding inside domains beside any of the dense
layers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal

from shoal.config import AxisLevels, Config, Level
from shoal.errors import ConfigError
from shoal.models import DecoderConfig
from shoal.parallel.context import SequenceCut
from shoal.parallel.expert import check_expert_degree
from shoal.plan.batches import Batches
from shoal.topology import Topology

MOST_STAGES = 128
MOST_CONTEXT = 64
MOST_EXPERT = 128
VIRTUAL = (1, 2, 4)
MICRO_BATCHES = (1, 2, 4, 8)
RECOMPUTE: tuple[Literal["none", "layer"], ...] = ("none", "layer")

_PAIRS = (
    (Level.REPLICATE, Level.REPLICATE),
    (Level.OPTIMIZER, Level.OPTIMIZER),
    (Level.GRADIENTS, Level.GRADIENTS),
    (Level.PARAMETERS, Level.PARAMETERS),
    (Level.REPLICATE, Level.PARAMETERS),
    (Level.OPTIMIZER, Level.PARAMETERS),
)
_FULL_INSIDE = AxisLevels(outer=Level.OPTIMIZER, inner=Level.PARAMETERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One layout."""

    topology: Topology
    virtual: int
    micro_batch: int
    recompute: Literal["none", "layer"]
    dense: AxisLevels
    expert: AxisLevels

    def overrides(self) -> dict[str, Any]:
        """Values of the keys that make it, in the order of a configuration."""
        topology = self.topology
        # What is exchanged in a ring is refused where ranks share no sequence.
        exchange = {} if topology.context > 1 else {"parallel.context_exchange": "gather"}
        return {
            "cluster.workers": topology.world_size,
            "cluster.nvlink_domain": topology.nvlink_domain,
            "parallel.pipeline": topology.pipeline,
            "parallel.virtual_stages": self.virtual,
            "parallel.context": topology.context,
            **exchange,
            "parallel.expert": topology.expert,
            "sharding.dense.outer": self.dense.outer.value,
            "sharding.dense.inner": self.dense.inner.value,
            "sharding.expert.outer": self.expert.outer.value,
            "sharding.expert.inner": self.expert.inner.value,
            "train.micro_batch": self.micro_batch,
            "train.recompute": self.recompute,
        }

    @property
    def words(self) -> str:
        """The layout in one line."""
        topology, parts = self.topology, []
        for name in ("pipeline", "context", "expert"):
            if getattr(topology, name) > 1:
                parts.append(f"{name} {getattr(topology, name)}")
        if self.virtual > 1:
            parts.insert(1, f"virtual {self.virtual}")
        levels = {"dense": self.dense, "experts": self.expert}
        if topology.expert == 1 and self.dense == self.expert:
            del levels["experts"]
        parts += [f"{kind} {one.outer.value}/{one.inner.value}" for kind, one in levels.items()]
        parts.append(f"micro batch {self.micro_batch}")
        if self.recompute != "none":
            parts.append("recompute")
        return ", ".join(parts)

    def apply(self, config: Config) -> Config:
        """``config`` at this layout."""
        topology = self.topology
        cluster = {
            "workers": topology.world_size,
            "nvlink_domain": topology.nvlink_domain,
        }
        parallel = {
            "pipeline": topology.pipeline,
            "virtual_stages": self.virtual,
            "context": topology.context,
            "expert": topology.expert,
        }
        train = {"micro_batch": self.micro_batch, "recompute": self.recompute}
        sharding = {"dense": self.dense, "expert": self.expert}
        return config.model_copy(
            update={
                "cluster": config.cluster.model_copy(update=cluster),
                "parallel": config.parallel.model_copy(update=parallel),
                "sharding": config.sharding.model_copy(update=sharding),
                "train": config.train.model_copy(update=train),
            }
        )


@dataclass(slots=True)
class Reasons:
    """Why layouts were refused: for each reason how many, and one of them."""

    counts: dict[tuple[str, str], int] = field(default_factory=dict)
    examples: dict[tuple[str, str], str] = field(default_factory=dict)
    _badness: dict[tuple[str, str], int] = field(default_factory=dict)

    def add(self, error: ConfigError, count: int = 1, *, badness: int = 0) -> None:
        """``count`` layouts were refused for a reason; reasons that differ in numbers are one.

        Of several examples the one of least ``badness`` is kept.
        """
        key = error.field, re.sub(r"\d[\d,.]*( [KMGTP]?i?B\b)?", "N", error.problem)
        self.counts[key] = self.counts.get(key, 0) + count
        if key not in self.examples or badness < self._badness[key]:
            self._badness[key] = badness
            self.examples[key] = f"{error.field} = {error.value}: {error.problem}"

    def rows(self) -> list[tuple[tuple[str, str], int, str]]:
        """Field and problem, number of layouts and example; the commonest first."""
        order = sorted(self.counts, key=lambda key: -self.counts[key])
        return [(key, self.counts[key], self.examples[key]) for key in order]


def candidates(
    config: Config, decoder: DecoderConfig, domain: int | None, reasons: Reasons
) -> Iterator[tuple[Candidate, ...]]:
    """Every layout of ``config`` that fits together; what does not goes to ``reasons``.

    Those that differ in sharding alone come together, the ones that shard least first.
    """
    workers = config.cluster.workers
    experts = 1 if decoder.experts is None else decoder.experts.num_experts
    for pipeline in _powers(min(workers, MOST_STAGES)):
        for context in _powers(min(workers, MOST_CONTEXT)):
            for expert in _powers(min(workers, MOST_EXPERT, experts)):
                below = len(VIRTUAL) * len(MICRO_BATCHES) * len(RECOMPUTE) * len(_PAIRS)
                try:
                    topology = Topology(
                        world_size=workers,
                        nvlink_domain=domain,
                        pipeline=pipeline,
                        context=context,
                        expert=expert,
                    )
                    if context > 1:
                        SequenceCut(length=config.data.seq_len, size=context)
                    check_expert_degree(experts, expert)
                except ConfigError as error:
                    reasons.add(error, below)
                    continue
                yield from _of_topology(config, decoder, topology, reasons)


def _of_topology(
    config: Config, decoder: DecoderConfig, topology: Topology, reasons: Reasons
) -> Iterator[tuple[Candidate, ...]]:
    levels = list(_levels(topology, decoder))
    below = len(levels) * len(RECOMPUTE)
    for virtual, micro_batch in product(VIRTUAL if topology.pipeline > 1 else (1,), MICRO_BATCHES):
        try:
            _check_pipeline(config, decoder, topology, virtual, micro_batch)
        except ConfigError as error:
            reasons.add(error, below)
            continue
        for recompute in RECOMPUTE:
            yield tuple(
                Candidate(
                    topology=topology,
                    virtual=virtual,
                    micro_batch=micro_batch,
                    recompute=recompute,
                    dense=dense,
                    expert=expert,
                )
                for dense, expert in levels
            )


def _check_pipeline(
    config: Config, decoder: DecoderConfig, topology: Topology, virtual: int, micro_batch: int
) -> None:
    """Raise ``ConfigError`` for a cut of layers or batches that does not come out."""
    chunks = topology.pipeline * virtual
    if chunks > decoder.num_layers:
        field, value = "parallel.pipeline", topology.pipeline
        if virtual > 1:
            field, value = "parallel.virtual_stages", virtual
        problem = f"{chunks} runs of layers are more than the model's {decoder.num_layers} layers"
        raise ConfigError(field, value, problem, f"Use at most {decoder.num_layers}")
    train = config.train.model_copy(update={"micro_batch": micro_batch})
    batches = Batches.of(config.model_copy(update={"train": train}), topology)
    if virtual > 1 and batches.num_microbatches % topology.pipeline:
        problem = (
            f"the number of microbatches, {batches.num_microbatches}, is no multiple of that of "
            f"the stages, {topology.pipeline}"
        )
        raise ConfigError("parallel.virtual_stages", virtual, problem, "Use 1")


def _levels(topology: Topology, decoder: DecoderConfig) -> Iterator[tuple[AxisLevels, AxisLevels]]:
    """Levels of dense and of expert layers; what an axis of one rank would have is left out."""
    known = set()
    for outer, inner in _PAIRS:
        dense = AxisLevels(outer=outer, inner=inner)
        others: Sequence[AxisLevels] = (dense, _FULL_INSIDE) if decoder.experts else (dense,)
        for expert in others:
            key = (
                _effective(dense, topology.outer, topology.inner),
                _effective(expert, topology.expert_outer, topology.expert_inner),
            )
            if key not in known:
                known.add(key)
                yield dense, expert


def _effective(levels: AxisLevels, outer: int, inner: int) -> tuple[Level | None, Level | None]:
    return (levels.outer if outer > 1 else None, levels.inner if inner > 1 else None)


def _powers(most: int) -> Iterator[int]:
    power = 1
    while power <= most:
        yield power
        power *= 2
