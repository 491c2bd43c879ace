"""Bytes of each rank, where many are alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from shoal.config import Config
from shoal.plan.group import Group, Layers, counted
from shoal.plan.memory import Kind, RankMemory, moment_bytes
from shoal.plan.precision import Precision
from shoal.plan.stage import Layout, StagePlan
from shoal.topology import Topology


def memory_of_ranks(
    ranks: Iterable[int], topology: Topology, stages: Mapping[int, StagePlan], layout: Layout
) -> Iterator[RankMemory]:
    """Bytes of each of ``ranks``. Those of a stage differ only in the rows that they hold, and so
    in the moments."""
    alike = {number: stage.num_bytes for number, stage in stages.items()}
    moments = {
        number: _Moments(stage.every_group, layout.config, layout.precision)
        for number, stage in stages.items()
    }
    for rank in ranks:
        at = topology.coordinates(rank)
        places = {"dense": (at.outer, at.inner), "expert": (at.expert_outer, at.expert_inner)}
        sizes = {**alike[at.pipeline], Kind.MOMENTS: moments[at.pipeline].num_bytes(places)}
        yield RankMemory(rank=rank, num_bytes={kind: sizes[kind] for kind in Kind})


class _Moments:
    """The moments of one stage's ranks; of groups that are alike, one is looked at."""

    def __init__(self, groups: Sequence[Group], config: Config, precision: Precision) -> None:
        self._config = config
        self._precision = precision
        self._kinds = counted(groups)
        self._known: dict[tuple[Layers, tuple[int, int]], int] = {}

    def num_bytes(self, places: dict[str, tuple[int, int]]) -> int:
        """Bytes on the rank that stands at ``places`` (by kind of layer)."""
        layers: set[Layers] = {group.layers for group, _ in self._kinds}
        return sum(self._of(kind, places[kind]) for kind in layers)

    def _of(self, layers: Layers, place: tuple[int, int]) -> int:
        key = layers, place
        if key not in self._known:
            self._known[key] = sum(
                count
                * moment_bytes((group,), {layers: place}, self._config.optimizer, self._precision)
                for group, count in self._kinds
                if group.layers == layers
            )
        return self._known[key]
