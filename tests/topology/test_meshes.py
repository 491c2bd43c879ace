"""Torch meshes on real gloo ranks agree with the topology's own groups."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shoal.errors import WorkError
from shoal.topology import MESH_AXES, Axis, Topology
from tests.ranks import RankPool

MESH_ROLES = {
    ("dense", "outer"): Axis.OUTER,
    ("dense", "inner"): Axis.INNER,
    ("expert", "outer"): Axis.EXPERT_OUTER,
    ("expert", "inner"): Axis.EXPERT_INNER,
}
Found = dict[tuple[str, str], tuple[list[int], int, float]]


def _groups_of_this_rank(topology: Topology) -> Found:
    """For each mesh and axis: the members, this rank's place and the sum of the members' ranks."""
    meshes = topology.meshes("cpu")
    found: Found = {}
    for kind, mesh in (("dense", meshes.dense), ("expert", meshes.expert)):
        assert mesh.mesh_dim_names == MESH_AXES
        for name in MESH_AXES:
            found[kind, name] = _described(mesh.get_group(name))
    if meshes.expert_group is not None:
        found["expert", "group"] = _described(meshes.expert_group)
    return found


def _described(group: ProcessGroup) -> tuple[list[int], int, float]:
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total, group=group)
    return dist.get_process_group_ranks(group), group.rank(), total.item()


@pytest.mark.parametrize(
    "topology",
    [
        Topology(world_size=1),
        Topology(world_size=2),
        Topology(world_size=4, nvlink_domain=2),
        Topology(world_size=4, nvlink_domain=1),
        Topology(world_size=4, expert=2),
        Topology(world_size=4, nvlink_domain=2, expert=2),
        Topology(world_size=4, expert=4, context=2),
        Topology(world_size=4, pipeline=2),
        Topology(world_size=4, pipeline=2, nvlink_domain=1),
        Topology(world_size=4, pipeline=2, nvlink_domain=2, expert=2),
    ],
    ids=str,
)
def test_meshes_hold_the_groups_of_the_topology(ranks: RankPool, topology: Topology) -> None:
    for rank, found in enumerate(ranks.run(topology.world_size, _groups_of_this_rank, topology)):
        assert (("expert", "group") in found) == (topology.expert > 1)
        roles = {**MESH_ROLES, ("expert", "group"): Axis.EXPERT}
        for role, axis in ((role, axis) for role, axis in roles.items() if role in found):
            expected = next(group for group in topology.groups(axis) if rank in group)
            members, place, total = found[role]
            assert tuple(members) == expected
            assert place == topology.coordinates(rank).along(axis)
            assert total == sum(expected)


def _meshes_are_one() -> bool:
    meshes = Topology(world_size=1).meshes("cpu")
    return meshes.dense is meshes.expert


def test_equal_meshes_are_one_object(ranks: RankPool) -> None:
    assert ranks.run(1, _meshes_are_one) == [True]


def _meshes_of_three() -> str:
    with pytest.raises(WorkError) as caught:
        Topology(world_size=3).meshes("cpu")
    return str(caught.value)


def test_meshes_refuse_another_world(ranks: RankPool) -> None:
    assert "counts 3 ranks, the process group 1" in ranks.run(1, _meshes_of_three)[0]


def test_meshes_need_a_process_group() -> None:
    with pytest.raises(WorkError, match="none is initialized"):
        Topology(world_size=1).meshes("cpu")
