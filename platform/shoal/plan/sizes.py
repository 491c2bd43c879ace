"""The numbers of workers that a run may have, where the cluster decides.

All that a step computes is the same at each of them: the global batch is that of
``cluster.workers``, and only its division over ranks and microbatches changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.config import Config
from shoal.errors import ConfigError
from shoal.plan.batches import Batches
from shoal.plan.facts import topology_of
from shoal.plan.machine import Machine
from shoal.plan.make import plan_checked
from shoal.plan.plan import Plan
from shoal.plan.rates import Rates
from shoal.plan.refusals import check_layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Which numbers of workers from ``workers_min`` to ``workers_max`` a layout can have."""

    feasible: tuple[int, ...]
    """In rising order; ``cluster.workers`` is one of them."""

    refused: Mapping[int, str]
    """What speaks against each of the others."""


def at_size(config: Config, workers: int) -> Config:
    """The same run on another number of workers, its global batch unchanged."""
    batch = Batches.of(config, topology_of(config)).global_batch
    return config.model_copy(
        update={
            "cluster": config.cluster.model_copy(update={"workers": workers}),
            "train": config.train.model_copy(update={"global_batch": batch}),
        }
    )


def sizes_of(config: Config) -> Sizes:
    """Look at every size of a run that is possible with ``cluster.workers``.

    Raises:
        ConfigError: for a bound of the workers that allows no size besides ``cluster.workers``.
    """
    cluster = config.cluster
    feasible, refused = [], {}
    for workers in cluster.sizes:
        if (obstacle := _obstacle(config, workers)) is None:
            feasible.append(workers)
        else:
            refused[workers] = obstacle
    lowest, highest = cluster.sizes.start, cluster.sizes.stop
    for name, bound, others, beyond in (
        ("workers_min", cluster.workers_min, range(lowest, cluster.workers), range(lowest, 0, -1)),
        (
            "workers_max",
            cluster.workers_max,
            range(cluster.workers + 1, highest),
            range(highest, 2 * highest),
        ),
    ):
        if others and not any(workers in feasible for workers in others):
            nearest = next((size for size in beyond if _obstacle(config, size) is None), None)
            hint = "" if nearest is None else f"Use {nearest}, the next size that it has, or choose"
            raise ConfigError(
                f"cluster.{name}",
                bound,
                f"no number of workers between it and {cluster.workers} can run; "
                f"with {others[0]}, {refused[others[0]]}",
                f"{hint or 'Choose'} a batch and a layout that divide among fewer or more, or "
                "leave it out",
            )
    return Sizes(feasible=tuple(feasible), refused=refused)


def _obstacle(config: Config, workers: int) -> str | None:
    """What speaks against so many workers."""
    try:
        changed = at_size(config, workers)
        Batches.of(changed, topology_of(changed))
    except ConfigError as error:
        return f"{error.field} = {error.value}: {error.problem}"
    return None


def plan_at(config: Config, workers: int, machine: Machine, *, rates: Rates | None = None) -> Plan:
    """The plan of one of a run's feasible sizes; what does not depend on it is not looked at."""
    changed = at_size(config, workers)
    decoder, topology = check_layout(changed)
    return plan_checked(changed, decoder, topology, machine, rates)
