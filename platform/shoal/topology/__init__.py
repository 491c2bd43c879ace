"""All degrees of parallelism in one checked value: ranks, axes, groups and torch meshes."""

from shoal.topology.axis import Axis, Coordinates
from shoal.topology.meshes import MESH_AXES, Meshes
from shoal.topology.topology import Topology

__all__ = ["Axis", "Coordinates", "MESH_AXES", "Meshes", "Topology"]
