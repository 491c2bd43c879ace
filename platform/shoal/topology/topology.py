"""All degrees of parallelism as one checked value, and the ranks' order that follows from them.

Ranks are numbered so that the links get faster towards the right::

    dense view    rank = ((pipeline * outer + o) * data_inner + d) * context + c
    expert view   rank = ((pipeline * outer + o) * expert_inner + r) * expert + e

Both views number the same ranks: a stage is a run of consecutive ranks, cut into domains of fast
links, and inside a domain the context ranks of a sequence, or the ranks that share a set of
experts, are neighbours. So the collectives of ``inner``, ``context``, ``expert`` and
``expert_inner`` never leave a domain; only ``outer``, ``expert_outer`` and ``pipeline`` do.

Context ranks hold equal dense layers, so they belong to the dense ``inner`` axis: ``inner`` is
data_inner * context, and a stage has outer * inner ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import torch.distributed as dist
from torch.distributed import ProcessGroup

from shoal.errors import ConfigError
from shoal.topology.axis import Axis, Coordinates
from shoal.topology.meshes import Meshes, build_meshes

_REST_OF_VIEW = {
    Axis.PIPELINE: ("outer", "inner"),
    Axis.OUTER: ("pipeline", "inner"),
    Axis.INNER: ("pipeline", "outer"),
    Axis.DATA: ("pipeline", "context"),
    Axis.CONTEXT: ("pipeline", "data"),
    Axis.EXPERT_OUTER: ("pipeline", "expert_inner", "expert"),
    Axis.EXPERT_INNER: ("pipeline", "expert_outer", "expert"),
    Axis.EXPERT: ("pipeline", "expert_outer", "expert_inner"),
}
"""For each axis the coordinates that the ranks of one of its groups have in common."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Degrees of parallelism of one job; raises ``ConfigError`` where they do not fit together."""

    world_size: int
    """Ranks of the job."""

    nvlink_domain: int | None = None
    """Ranks that share fast links; ``None`` puts all of them in one domain."""

    pipeline: int = 1
    """Stages."""

    context: int = 1
    """Ranks that share one sequence."""

    expert: int = 1
    """Ranks that share one set of experts."""

    def __post_init__(self) -> None:
        self._check_positive()
        self._check_stages()
        self._check_domains()

    @property
    def domain(self) -> int:
        """Ranks of one domain."""
        return self.nvlink_domain or self.world_size

    @property
    def num_domains(self) -> int:
        """Domains of the job."""
        return self.world_size // self.domain

    @property
    def stage(self) -> int:
        """Ranks of one pipeline stage."""
        return self.world_size // self.pipeline

    @property
    def inner(self) -> int:
        """Ranks with equal dense layers inside one domain."""
        return min(self.domain, self.stage)

    @property
    def outer(self) -> int:
        """Domains over which the dense layers of a stage extend."""
        return self.stage // self.inner

    @property
    def data(self) -> int:
        """Data-parallel size: ranks, or groups of context ranks, with different sequences."""
        return self.stage // self.context

    @property
    def expert_data(self) -> int:
        """Ranks with equal experts."""
        return self.stage // self.expert

    @property
    def expert_inner(self) -> int:
        """Ranks with equal experts inside one domain."""
        return self.inner // self.expert

    @property
    def expert_outer(self) -> int:
        """Domains over which the experts of a stage extend."""
        return self.outer

    def size(self, axis: Axis) -> int:
        """Ranks of one group along ``axis``."""
        size: int = getattr(self, axis.value)
        return size

    def coordinates(self, rank: int) -> Coordinates:
        """Where ``rank`` stands on every axis."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not one of {self.world_size} ranks")
        pipeline, in_stage = divmod(rank, self.stage)
        outer, inner = divmod(in_stage, self.inner)
        data, context = divmod(in_stage, self.context)
        expert_inner, expert = divmod(inner, self.expert)
        return Coordinates(
            domain=rank // self.domain,
            pipeline=pipeline,
            outer=outer,
            inner=inner,
            data=data,
            context=context,
            expert_outer=outer,
            expert_inner=expert_inner,
            expert=expert,
        )

    def groups(self, axis: Axis) -> tuple[tuple[int, ...], ...]:
        """The groups of ranks along ``axis``, each in the order of its members' places."""
        shared = _REST_OF_VIEW[axis]

        def rest(rank: int) -> tuple[int, ...]:
            coordinates = self.coordinates(rank)
            return tuple(coordinates.along(Axis(name)) for name in shared)

        # The sort is stable, so the members of a group stay in rank order, which is place order.
        ranks = sorted(range(self.world_size), key=rest)
        return tuple(tuple(members) for _, members in groupby(ranks, key=rest))

    def meshes(self, device_type: str) -> Meshes:
        """Torch meshes of this rank's stage; every rank calls it inside the default group.

        Raises:
            WorkError: where the default process group is missing or of another size.
        """
        return build_meshes(
            device_type,
            dense=(self.pipeline, self.outer, self.inner),
            expert=(self.pipeline, self.expert_outer, self.expert_inner, self.expert),
        )

    def process_group(self, axis: Axis) -> ProcessGroup:
        """This rank's group along ``axis``, new; its members call it inside the default group.

        They may as well call it at different times from the members of other groups.
        """
        rank = dist.get_rank()
        members = next(group for group in self.groups(axis) if rank in group)
        group = dist.new_group(list(members), use_local_synchronization=True)
        assert isinstance(group, ProcessGroup)
        return group

    def _check_positive(self) -> None:
        for field, value in {
            "cluster.workers": self.world_size,
            "cluster.nvlink_domain": self.domain,
            "parallel.pipeline": self.pipeline,
            "parallel.context": self.context,
            "parallel.expert": self.expert,
        }.items():
            if value < 1:
                raise ConfigError(field, value, "must be at least 1", "Use a number from 1 up")

    def _check_stages(self) -> None:
        world, pipeline = self.world_size, self.pipeline
        if world % pipeline:
            raise ConfigError(
                "cluster.workers",
                world,
                f"does not divide into {pipeline} pipeline stages of equal size",
                f"Use a multiple of {pipeline} workers or another parallel.pipeline",
            )
        if world % self.domain:
            raise ConfigError(
                "cluster.nvlink_domain",
                self.domain,
                f"{world} workers do not fill domains of {self.domain} ranks evenly",
                f"Use a divisor of {world} or another cluster.workers",
            )
        if self.stage % self.domain and self.domain % self.stage:
            raise ConfigError(
                "cluster.nvlink_domain",
                self.domain,
                f"domains of {self.domain} ranks cut across pipeline stages of {self.stage} ranks",
                "Use domains that divide a stage or hold whole stages",
            )

    def _check_domains(self) -> None:
        for name, degree in {"context": self.context, "expert": self.expert}.items():
            if self.inner % degree:
                raise ConfigError(
                    f"parallel.{name}",
                    degree,
                    f"{self.inner} ranks of one stage share fast links, and groups of {degree} "
                    f"would reach across them: every layer's exchange would take the slow links",
                    f"Use a divisor of {self.inner} or a larger cluster.nvlink_domain",
                )
