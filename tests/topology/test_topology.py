"""Degrees, ranks and groups, over every topology of a small size."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import ConfigError
from shoal.topology import Axis, Topology

DENSE_VIEW = (Axis.PIPELINE, Axis.OUTER, Axis.INNER)
SEQUENCE_VIEW = (Axis.PIPELINE, Axis.DATA, Axis.CONTEXT)
EXPERT_VIEW = (Axis.PIPELINE, Axis.EXPERT_OUTER, Axis.EXPERT_INNER, Axis.EXPERT)
INSIDE_A_DOMAIN = (Axis.INNER, Axis.CONTEXT, Axis.EXPERT, Axis.EXPERT_INNER)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """Topologies that fit together, of up to 64 ranks."""
    world = draw(st.integers(1, 64))
    pipeline = draw(st.sampled_from(_divisors(world)))
    stage = world // pipeline
    fits = [d for d in _divisors(world) if stage % d == 0 or d % stage == 0]
    domain = draw(st.sampled_from([None, *fits]))
    inner = min(domain or world, stage)
    return Topology(
        world_size=world,
        nvlink_domain=domain,
        pipeline=pipeline,
        context=draw(st.sampled_from(_divisors(inner))),
        expert=draw(st.sampled_from(_divisors(inner))),
    )


@given(topologies())
@settings(max_examples=60)
def test_sizes_multiply_to_the_world(topology: Topology) -> None:
    for view in (DENSE_VIEW, SEQUENCE_VIEW, EXPERT_VIEW):
        assert prod(topology.size(axis) for axis in view) == topology.world_size
    assert topology.outer * topology.inner == topology.data * topology.context
    assert topology.expert_data == topology.expert_outer * topology.expert_inner
    assert topology.num_domains * topology.domain == topology.world_size


@given(topologies())
@settings(max_examples=60)
def test_each_rank_is_in_one_group_of_each_axis(topology: Topology) -> None:
    for axis in Axis:
        groups = topology.groups(axis)
        members = [rank for group in groups for rank in group]
        assert sorted(members) == list(range(topology.world_size))
        assert {len(group) for group in groups} == {topology.size(axis)}
        for group in groups:
            places = [topology.coordinates(rank).along(axis) for rank in group]
            assert places == list(range(topology.size(axis)))


@given(topologies())
@settings(max_examples=60)
def test_each_view_names_every_rank_once(topology: Topology) -> None:
    for view in (DENSE_VIEW, SEQUENCE_VIEW, EXPERT_VIEW):
        names = {
            tuple(topology.coordinates(rank).along(axis) for axis in view)
            for rank in range(topology.world_size)
        }
        assert len(names) == topology.world_size


@given(topologies())
@settings(max_examples=60)
def test_frequent_exchanges_stay_inside_a_domain(topology: Topology) -> None:
    for axis in INSIDE_A_DOMAIN:
        for group in topology.groups(axis):
            assert len({topology.coordinates(rank).domain for rank in group}) == 1


def test_an_example_by_hand() -> None:
    topology = Topology(world_size=16, nvlink_domain=4, pipeline=2, context=2, expert=2)
    assert topology.groups(Axis.PIPELINE)[0] == (0, 8)
    assert topology.groups(Axis.OUTER)[:2] == ((0, 4), (1, 5))
    assert topology.groups(Axis.INNER) == (
        (0, 1, 2, 3),
        (4, 5, 6, 7),
        (8, 9, 10, 11),
        (12, 13, 14, 15),
    )
    assert topology.groups(Axis.DATA)[:2] == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert topology.groups(Axis.CONTEXT)[:2] == ((0, 1), (2, 3))
    assert topology.groups(Axis.EXPERT_INNER)[:2] == ((0, 2), (1, 3))
    assert topology.groups(Axis.EXPERT)[:2] == ((0, 1), (2, 3))
    at = topology.coordinates(13)
    assert (at.domain, at.pipeline, at.outer, at.inner) == (3, 1, 1, 1)
    assert (at.data, at.context, at.expert_inner, at.expert) == (2, 1, 0, 1)


def test_one_rank_has_every_axis_of_size_one() -> None:
    topology = Topology(world_size=1)
    assert {topology.size(axis) for axis in Axis} == {1}


@pytest.mark.parametrize(
    ("degrees", "field", "words"),
    [
        ({"world_size": 0}, "cluster.workers", "must be at least 1"),
        ({"world_size": 4, "pipeline": 0}, "parallel.pipeline", "must be at least 1"),
        ({"world_size": 4, "context": -2}, "parallel.context", "must be at least 1"),
        ({"world_size": 6, "pipeline": 4}, "cluster.workers", "Use a multiple of 4 workers"),
        ({"world_size": 8, "nvlink_domain": 3}, "cluster.nvlink_domain", "Use a divisor of 8"),
        ({"world_size": 4, "nvlink_domain": 8}, "cluster.nvlink_domain", "Use a divisor of 4"),
        (
            {"world_size": 12, "nvlink_domain": 4, "pipeline": 2},
            "cluster.nvlink_domain",
            "cut across pipeline stages of 6 ranks",
        ),
        (
            {"world_size": 8, "nvlink_domain": 2, "expert": 4},
            "parallel.expert",
            "larger cluster.nvlink_domain",
        ),
        ({"world_size": 8, "nvlink_domain": 4, "context": 3}, "parallel.context", "divisor of 4"),
    ],
)
def test_degrees_that_do_not_fit(degrees: dict[str, int], field: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Topology(**degrees)
    assert caught.value.field == field
    assert words in str(caught.value)


def test_a_rank_outside_the_job() -> None:
    with pytest.raises(ValueError, match="rank 4 is not one of 4 ranks"):
        Topology(world_size=4).coordinates(4)
