"""What every driver needs, of training and of serving: a Ray cluster, a terminal, a way to end."""

from shoal_actors.driver.cluster import (
    Cluster,
    is_elsewhere,
    num_fitting,
    open_cluster,
    places_in_order,
)
from shoal_actors.driver.console import divert_output
from shoal_actors.driver.stop import Terminated, termination_raises

__all__ = [
    "Cluster",
    "Terminated",
    "divert_output",
    "is_elsewhere",
    "num_fitting",
    "open_cluster",
    "places_in_order",
    "termination_raises",
]
