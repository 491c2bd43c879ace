"""What the rules look at that may refuse a run, and what follows from a configuration alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shoal.config import Config
from shoal.errors import ConfigError
from shoal.models import DecoderConfig
from shoal.parallel.pipeline import Stages
from shoal.plan.machine import Machine
from shoal.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the rules look at."""

    config: Config
    machine: Machine

    decoder: DecoderConfig | None
    """The model; ``None`` where it cannot be read, which is a refusal of its own."""

    topology: Topology | None
    """The ranks; ``None`` where the degrees do not fit together, a refusal of its own."""


Rule = Callable[[Facts], Iterator[ConfigError]]
"""Yields what is wrong in one respect."""


def topology_of(config: Config) -> Topology:
    """The ranks that ``cluster`` and ``parallel`` describe; raises ``ConfigError``."""
    return Topology(
        world_size=config.cluster.workers,
        nvlink_domain=config.cluster.nvlink_domain,
        pipeline=config.parallel.pipeline,
        context=config.parallel.context,
        expert=config.parallel.expert,
    )


def stages_of(config: Config) -> Stages:
    """The pipeline that ``parallel`` describes."""
    parallel = config.parallel
    return Stages(num_stages=parallel.pipeline, virtual=parallel.virtual_stages)
