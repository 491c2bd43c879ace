"""Training over any mesh and placement equals training in one process (A3, acceptance 2)."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from shoal.fsdp import Transport
from tests.fsdp.toys import (
    EQUAL,
    LADDER,
    assert_same_weights,
    build,
    mesh_of,
    placements_on,
    shard,
    train,
    train_alone,
)
from tests.ranks import RankPool

STEPS = 5
RTOL = 1e-5
ATOL = 1e-6
"""Weights near zero: what fp32 leaves of 1e-5 of an update."""


def _every_cell(shapes: list[tuple[int, ...]], transport: Transport) -> int:
    """All levels, {1, 3} microbatches and both ways to clear gradients; the number of cells."""
    cells = 0
    for microbatches in (1, 3):
        reference = build()
        optimizer = torch.optim.SGD(reference.parameters(), lr=0.5)
        expected = train_alone(
            reference,
            optimizer,
            steps=STEPS,
            microbatches=microbatches,
            ranks=dist.get_world_size(),
        )
        for shape in shapes:
            mesh = mesh_of(shape)
            for outer, inner in LADDER if len(shape) == 2 else EQUAL:
                cells += 1
                placements = placements_on(mesh, outer, inner)
                sharded = shard(build(), mesh, placements, transport=transport)
                losses = train(
                    sharded,
                    torch.optim.SGD(sharded.model.parameters(), lr=0.5),
                    steps=STEPS,
                    microbatches=microbatches,
                    set_to_none=cells % 2 == 0,
                )
                assert losses == pytest.approx(expected, rel=RTOL), (shape, outer, inner)
                assert_same_weights(sharded.model, reference, RTOL, ATOL)
    return cells


@pytest.mark.parametrize(
    ("world_size", "shapes", "transport"),
    [
        (1, [(1, 1), (1,)], Transport.AUTO),
        (2, [(1, 2), (2, 1), (2,)], Transport.AUTO),
        (2, [(1, 2)], Transport.GLOO),
        (4, [(2, 2), (4,)], Transport.AUTO),
        (4, [(2, 2)], Transport.GLOO),
    ],
)
def test_every_placement_trains_like_one_process(
    ranks: RankPool, world_size: int, shapes: list[tuple[int, ...]], transport: Transport
) -> None:
    cells = ranks.run(world_size, _every_cell, shapes, transport)
    expected = sum(2 * (10 if len(shape) == 2 else 4) for shape in shapes)
    assert cells == [expected] * world_size
