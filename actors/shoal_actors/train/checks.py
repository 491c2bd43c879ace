"""What is refused once the cluster and the run's folder are known, before any worker starts."""

from __future__ import annotations

from shoal.checkpoint import RunFolder
from shoal.config import Config
from shoal.errors import ConfigError
from shoal.plan import Plan
from shoal_actors.driver import Cluster, places_in_order
from shoal_actors.train.domains import check_domains, filled, keeps_domains
from shoal_actors.train.gang import Gang
from shoal_actors.train.room import in_words


def check_places(gang: Gang, cluster: Cluster, *, field: str, domain: int | None) -> None:
    """Refuse more workers than the cluster can ever place; raises ConfigError about ``field``.

    And about ``cluster.nvlink_domain``, where the cluster cannot grow and its nodes tear a domain
    also once nobody else uses them.
    """
    places = cluster.num_places(gang.resources)
    if gang.num_workers > places:
        raise ConfigError(
            field,
            gang.num_workers,
            f"the cluster has room for {places} workers of {in_words(gang.resources)} each, and "
            "cannot grow further",
            f"Use at most {places}" if places else "Use a cluster with such resources",
        )
    now = cluster.free_places(gang.resources, {})
    fits_now = sum(now) >= gang.num_workers and keeps_domains(now, gang.num_workers, domain)
    if cluster.limit is None and not fits_now:
        counts = filled(places_in_order(cluster.nodes, gang.resources), gang.num_workers)
        nodes = [str(node) for node, count in enumerate(counts) for _ in range(count)]
        check_domains(nodes, domain)


def check_room(config: Config, plan: Plan, folder: RunFolder) -> None:
    """Refuse a disk that cannot hold a single checkpoint; raises ConfigError."""
    assert plan.saves is not None, "the plan of a run as configured tells what it saves"
    needed, room = plan.saves.num_bytes, folder.room()
    if room is not None and room < needed:
        storage = config.checkpoint.storage
        raise ConfigError(
            "run.dir" if storage is None else "checkpoint.storage",
            config.run.dir if storage is None else storage,
            f"one checkpoint takes {needed:,} bytes and {room:,} are free there",
            "Free some, or choose a folder on another disk",
        )
