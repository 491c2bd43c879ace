"""Every way between two placements keeps or reduces the values it should (A2)."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

from shoal.errors import ConfigError
from shoal.fsdp import (
    FlatBuffer,
    GlobalLayout,
    Partial,
    Placement,
    Replicate,
    Shard,
    Transport,
    communicator_for,
)
from shoal.fsdp.grid import Grid
from shoal.fsdp.memory import LocalMemory
from tests.fsdp.toys import mesh_of
from tests.ranks import RankPool

SHAPES = [(5, 4), (2, 6), (3,), (7, 2)]
R, S, AVERAGE, SUM = Replicate(), Shard(0), Partial("avg"), Partial("sum")


def _grid(shape: tuple[int, ...]) -> Grid:
    mesh, cpu = mesh_of(shape), torch.device("cpu")
    return Grid(
        communicators=tuple(
            communicator_for(mesh.get_group(d), cpu, Transport.GLOO) for d in range(mesh.ndim)
        ),
        members=frozenset(range(dist.get_world_size())),
        device=cpu,
        local=LocalMemory(cpu),
    )


def _vectors(length: int) -> list[tuple[Placement, ...]]:
    """Every vector without a sharded axis outside one that is not."""
    kinds: tuple[Placement, ...] = (R, S, AVERAGE, SUM)
    vectors = itertools.product(kinds, repeat=length)
    return [v for v in vectors if [k == S for k in v] == sorted(k == S for k in v)]


def _holds(grid: Grid, layout: GlobalLayout, kinds: tuple[Placement, ...]) -> FlatBuffer:
    """A buffer for the values 1, 2, 3, ... : whole or its run, or contributions scaled by rank.

    Along a partial axis rank r contributes the values times r + 1.
    """
    values = torch.arange(1.0, layout.size + 1)
    start, stop = layout.run([k == S for k in kinds], grid.sizes, grid.ranks)
    scale = 1
    for kind, rank in zip(kinds, grid.ranks, strict=True):
        scale *= rank + 1 if isinstance(kind, Partial) else 1
    data = values[start:stop] * scale
    return FlatBuffer(layout=layout, grid=grid, placements=kinds, data=data)


def _factor(grid: Grid, before: tuple[Placement, ...], after: tuple[Placement, ...]) -> float:
    """By how much reducing rank-scaled contributions multiplies the values."""
    factor = 1.0
    for kind, target, size, rank in zip(before, after, grid.sizes, grid.ranks, strict=True):
        if isinstance(kind, Partial) and isinstance(target, Partial):
            factor *= rank + 1
        elif kind == SUM:
            factor *= size * (size + 1) / 2
        elif kind == AVERAGE:
            factor *= (size + 1) / 2
    return factor


def _every_transition(shape: tuple[int, ...]) -> int:
    grid = _grid(shape)
    layout = GlobalLayout.build(SHAPES, dist.get_world_size())
    count = 0
    for before in _vectors(len(shape)):
        for after in _vectors(len(shape)):
            if any(b != a and a == SUM for b, a in zip(before, after, strict=True)):
                continue
            if any(b == SUM and a == AVERAGE for b, a in zip(before, after, strict=True)):
                continue
            source = _holds(grid, layout, before)
            result = source.redistribute(after)
            expected = _holds(grid, layout, tuple(S if a == S else R for a in after))
            torch.testing.assert_close(
                result.data, expected.data * _factor(grid, before, after), rtol=1e-6, atol=0
            )
            out = torch.full_like(result.data, float("nan"))
            again = _holds(grid, layout, before).redistribute(after, out=out)
            assert again.data.data_ptr() == out.data_ptr()
            torch.testing.assert_close(out, result.data, rtol=0, atol=0)
            count += 1
    return count


@pytest.mark.parametrize(
    ("shape", "at_least"), [((1,), 10), ((4,), 10), ((2, 2), 80), ((1, 2), 80), ((2, 1), 80)]
)
def test_every_transition(ranks: RankPool, shape: tuple[int, ...], at_least: int) -> None:
    world_size = torch.Size(shape).numel()
    counts = ranks.run(world_size, _every_transition, shape)
    assert set(counts) == {counts[0]}
    assert counts[0] >= at_least


def _aliases_and_refusals() -> None:
    grid = _grid((2, 2))
    layout = GlobalLayout.build(SHAPES, 4)
    whole = _holds(grid, layout, (R, R))
    part = whole.redistribute((S, S))
    assert part.data.untyped_storage().data_ptr() == whole.data.untyped_storage().data_ptr()
    assert whole.redistribute((AVERAGE, R)).data.data_ptr() == whole.data.data_ptr()
    for index, shape in enumerate(SHAPES):
        view = part.view(index)
        assert view.shape[1:] == torch.Size(shape[1:])
        rows = part.rows(index)
        expected = whole.view(index)[rows.start : rows.stop]
        torch.testing.assert_close(view, expected, rtol=0, atol=0)
    impossible: list[tuple[tuple[Placement, ...], tuple[Placement, ...]]]
    impossible = [((R, R), (S, R)), ((R, R), (R, SUM)), ((R, S), (R, SUM))]
    for before, after in impossible:
        with pytest.raises(ConfigError, match="placements"):
            _holds(grid, layout, before).redistribute(after)
    with pytest.raises(ValueError, match="float64"):
        whole.redistribute((S, S), out=part.data.double())
    with pytest.raises(ValueError, match="elements"):
        whole.redistribute((S, S), out=whole.data.clone())


def test_parts_share_memory_and_nonsense_is_refused(ranks: RankPool) -> None:
    ranks.run(4, _aliases_and_refusals)
