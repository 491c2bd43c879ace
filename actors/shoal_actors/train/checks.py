"""What is refused once the cluster and the run's folder are known, before any worker starts."""

from __future__ import annotations

from shoal.checkpoint import RunFolder
from shoal.config import Config
from shoal.errors import ConfigError
from shoal.plan import Plan
from shoal_actors.driver import Cluster
from shoal_actors.train.gang import Gang
from shoal_actors.train.room import in_words


def check_places(gang: Gang, cluster: Cluster, *, field: str) -> None:
    """Refuse more workers than the cluster can ever place; raises ConfigError about ``field``."""
    places = cluster.num_places(gang.resources)
    if gang.num_workers > places:
        raise ConfigError(
            field,
            gang.num_workers,
            f"the cluster has room for {places} workers of {in_words(gang.resources)} each, and "
            "cannot grow further",
            f"Use at most {places}" if places else "Use a cluster with such resources",
        )


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
