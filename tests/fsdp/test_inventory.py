"""What ranks say they hold: every row once, in the same order, under the right name."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shoal.fsdp import (
    Share,
    fully_shard,
    fully_shard_context,
    is_sharded,
    sharded_parameters,
)
from tests.fsdp.toys import LADDER, P, build, mesh_of, placements_on, shard
from tests.ranks import RankPool

Held = list[tuple[tuple[str, ...], tuple[int, ...], int, int, bool]]


def _held() -> list[Held]:
    mesh = mesh_of((2, 2))
    found = []
    for outer, inner in LADDER:
        model, whole = build(tied=True), dict(build(tied=True).named_parameters())
        assert not is_sharded(model)
        shard(model, mesh, placements_on(mesh, outer, inner))
        assert is_sharded(model)
        parameters = sharded_parameters(model)
        assert [p.name for p in parameters] == list(whole)
        for parameter in parameters:
            rows = whole[parameter.name][parameter.row_start : parameter.row_stop]
            torch.testing.assert_close(parameter.local, rows, rtol=0, atol=0)
            assert parameter.local is model.get_parameter(parameter.names[-1])
        found.append(
            [(p.names, tuple(p.shape), p.row_start, p.row_stop, p.primary) for p in parameters]
        )
    return found


def test_each_row_has_one_primary_holder(ranks: RankPool) -> None:
    by_rank = ranks.run(4, _held)
    for cell in zip(*by_rank, strict=True):
        for holders in zip(*cell, strict=True):
            assert len({(names, shape) for names, shape, *_ in holders}) == 1
            rows = [set(range(start, stop)) for _, _, start, stop, primary in holders if primary]
            assert sum(map(len, rows)) == holders[0][1][0]
            assert set().union(*rows) == set(range(holders[0][1][0]))


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def _wasteful() -> list[str]:
    records = _Records()
    logging.getLogger("shoal.fsdp.group").addHandler(records)
    mesh = mesh_of((dist.get_world_size(),))
    layers = [nn.Linear(width, 1, bias=False) for width in (101, 103, 107)]
    shard(nn.Sequential(*layers), mesh, placements_on(mesh, P, P), [])
    shard(nn.Linear(101, 1), mesh, placements_on(mesh, P, P), [])
    return records.messages


def test_padding_that_dwarfs_the_parameters_is_reported(ranks: RankPool) -> None:
    for messages in ranks.run(2, _wasteful):
        [message] = messages
        assert "for 311 of parameters" in message


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_odd_numbers_of_ranks(ranks: RankPool, num_ranks: int) -> None:
    for cells in ranks.run(num_ranks, _held_on_a_line):
        assert cells == 11


def _held_on_a_line() -> int:
    mesh = mesh_of((dist.get_world_size(),))
    model = build(tied=True)
    shard(model, mesh, placements_on(mesh, P, P))
    return len(sharded_parameters(model))


def _held_of_a_share() -> Held:
    """Two ranks of a mesh of their own hold the second of three parts."""
    mesh = mesh_of((2,))
    model = nn.Linear(4, 7)
    placements = placements_on(mesh, P, P)
    with fully_shard_context("cpu") as context:
        fully_shard(model, mesh, placements, share=Share(index=1, count=3))
    model(torch.ones(1, 4)).sum().backward()
    assert not context.in_backward
    parameters = sharded_parameters(model)
    for parameter in parameters:
        assert torch.equal(parameter.local, model.get_parameter(parameter.name))
    return [(p.names, tuple(p.shape), p.row_start, p.row_stop, p.primary) for p in parameters]


def test_a_share_is_told_by_the_rows_of_the_whole(ranks: RankPool) -> None:
    by_rank = ranks.run(2, _held_of_a_share)
    for index, whole in enumerate([(21, 4), (21,)]):
        rows = [set(range(held[index][2], held[index][3])) for held in by_rank]
        assert {held[index][1] for held in by_rank} == {whole}
        assert rows[0] | rows[1] == set(range(7, 14)) and not rows[0] & rows[1]
