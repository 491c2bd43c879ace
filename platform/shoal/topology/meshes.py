"""Torch meshes over the data-parallel ranks of a stage, and the groups beside them."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shoal.errors import WorkError

MESH_AXES = ("outer", "inner")
"""Names of both dimensions of either mesh: across the domains of fast links and inside one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meshes:
    """The two meshes that parameters are sharded over, each two-dimensional (``MESH_AXES``).

    Beside them stands the group in which tokens travel.
    """

    dense: DeviceMesh
    """Ranks that hold equal dense layers, ``[outer, inner]``."""

    expert: DeviceMesh
    """Ranks that hold equal experts, ``[expert_outer, expert_inner]``; the dense mesh itself where
    the two hold the same ranks, so that no communicator exists twice."""

    expert_group: ProcessGroup | None
    """Ranks that share one set of experts, in the order of their parts of it; ``None`` where each
    rank has all of them."""


def build_meshes(
    device_type: str, *, dense: tuple[int, int, int], expert: tuple[int, int, int, int]
) -> Meshes:
    """Meshes of the stage that this rank belongs to.

    Args:
        device_type: ``cpu`` or ``cuda``.
        dense: Sizes of pipeline, outer and inner; together all ranks.
        expert: Sizes of pipeline, outer, inner and expert; together all ranks.

    Raises:
        WorkError: where the default process group is missing or of another size.
    """
    pipeline, outer, inner = dense
    world_size = pipeline * outer * inner
    if not dist.is_initialized():
        raise WorkError("Meshes need the default process group, and none is initialized.")
    if dist.get_world_size() != world_size:
        raise WorkError(
            f"The topology counts {world_size} ranks, the process group {dist.get_world_size()}."
        )
    dense_mesh = _stage_mesh(device_type, dense, ("pipeline", *MESH_AXES))
    if expert[-1] == 1:
        return Meshes(dense=dense_mesh, expert=dense_mesh, expert_group=None)
    names = ("pipeline", *MESH_AXES, "expert")
    whole = init_device_mesh(device_type, expert, mesh_dim_names=names)
    return Meshes(dense=dense_mesh, expert=whole[MESH_AXES], expert_group=whole.get_group("expert"))


def _stage_mesh(device_type: str, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    if sizes[0] == 1:
        return init_device_mesh(device_type, sizes[1:], mesh_dim_names=names[1:])
    whole = init_device_mesh(device_type, sizes, mesh_dim_names=names)
    return whole[names[1:]]
