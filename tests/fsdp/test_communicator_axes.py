"""Several axes in one process: nobody waits in a circle."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shoal.fsdp.communicator import Communicator, Pending
from shoal.fsdp.reduction import Reduction
from shoal.fsdp.transport import Transport, communicator_for
from tests.ranks import RankPool


def _communicators(transports: list[Transport]) -> list[Communicator]:
    """Both axes of a 2 x 2 mesh, and the world."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    world = dist.group.WORLD
    assert world is not None
    groups = [mesh.get_group(0), mesh.get_group(1), world]
    cpu = torch.device("cpu")
    return [
        communicator_for(group, cpu, transport)
        for group, transport in zip(groups, transports, strict=True)
    ]


def _reduce(
    communicator: Communicator, whole: bool, value: float
) -> tuple[Pending, torch.Tensor, float]:
    """A reduction under way, where its result goes, and what every element must be."""
    numel = communicator.size * 20_000 if whole else communicator.size * 4
    partial = communicator.lend(numel, torch.float32).fill_(value)
    output = torch.empty(numel if whole else 4)
    reduce = communicator.all_reduce if whole else communicator.reduce_scatter
    pending = reduce(output, partial, Reduction(accumulate_dtype=torch.float32))
    return pending, output, communicator.size * value


def _wait_in_any_order(transports: list[Transport]) -> None:
    communicators = _communicators(transports)
    program, own = random.Random(1), random.Random(100 + dist.get_rank())
    buffers = [
        [communicator.allocate(communicator.size * 64, torch.float32) for _ in range(2)]
        for communicator in communicators
    ]
    for _ in range(30):
        deeds = []
        free = [list(pair) for pair in buffers]
        for turn in range(8):
            axis = program.randrange(3)
            if free[axis] and program.random() < 0.5:
                buffer, value = free[axis].pop(), float(turn)
                shard = torch.full((64,), value)
                deeds.append((communicators[axis].all_gather(buffer, shard), buffer, value))
            else:
                whole = program.random() < 0.5
                deeds.append(_reduce(communicators[axis], whole, float(turn)))
        own.shuffle(deeds)
        for pending, output, value in deeds:
            pending.wait()
            assert torch.equal(output, torch.full_like(output, value))


@pytest.mark.parametrize(
    "transports",
    [
        [Transport.SHARED_MEMORY] * 3,
        [Transport.GLOO] * 3,
        [Transport.GLOO, Transport.SHARED_MEMORY, Transport.GLOO],
    ],
    ids=["shared memory", "gloo", "both"],
)
def test_ranks_may_wait_on_several_axes_in_any_order(
    ranks: RankPool, transports: list[Transport]
) -> None:
    ranks.run(4, _wait_in_any_order, transports)
