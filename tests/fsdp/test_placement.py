"""The table of strategies, and the placements that cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.config import Level
from shoal.errors import ConfigError
from shoal.fsdp import Partial, Placement, Placements, Replicate, Shard, placements_for
from tests.fsdp.toys import LADDER

R, S = Replicate(), Shard(0)
AVERAGE = Partial("avg")


@pytest.mark.parametrize(
    ("outer", "inner", "parameter", "gradient", "optimizer"),
    [
        ("replicate", "replicate", (R, R), (AVERAGE, AVERAGE), (R, R)),
        ("optimizer", "optimizer", (R, R), (AVERAGE, AVERAGE), (S, S)),
        ("gradients", "gradients", (R, R), (S, S), (S, S)),
        ("parameters", "parameters", (S, S), (S, S), (S, S)),
        ("replicate", "parameters", (R, S), (AVERAGE, S), (R, S)),
        ("optimizer", "parameters", (R, S), (AVERAGE, S), (S, S)),
        ("optimizer", "gradients", (R, R), (AVERAGE, S), (S, S)),
    ],
)
def test_named_strategies(
    outer: str,
    inner: str,
    parameter: tuple[Placement, ...],
    gradient: tuple[Placement, ...],
    optimizer: tuple[Placement, ...],
) -> None:
    placements = placements_for(Level(outer), Level(inner))
    assert placements.parameter == parameter
    assert placements.gradient == gradient
    assert placements.optimizer == optimizer


def test_the_outer_axis_never_shards_more_than_the_inner_one() -> None:
    for outer in Level:
        for inner in Level:
            if (outer, inner) in LADDER:
                placements_for(outer, inner)
            else:
                with pytest.raises(ConfigError, match="sharding.outer"):
                    placements_for(outer, inner)


ZERO2: dict[str, Any] = {
    "axes": ("outer", "inner"),
    "parameter": (R, R),
    "gradient": (S, S),
    "optimizer": (S, S),
}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"parameter": (R,)}, "1 entries for 2 axes"),
        ({"optimizer": (S, S, S)}, "3 entries for 2 axes"),
        ({"axes": (), "parameter": (), "gradient": (), "optimizer": ()}, "0 entries"),
        ({"parameter": (R, AVERAGE)}, "placements.parameter"),
        ({"gradient": (R, S)}, "placements.gradient"),
        ({"gradient": (Partial("sum"), S)}, "placements.gradient"),
        ({"optimizer": (AVERAGE, S)}, "placements.optimizer"),
        ({"gradient": (S, Shard(1))}, "split rows only"),
        ({"parameter": (S, R)}, "outside an axis that is not sharded"),
        ({"parameter": (S, S), "gradient": (AVERAGE, S)}, "Shard it there too"),
        ({"optimizer": (R, S)}, "Shard it there too"),
    ],
)
def test_impossible_placements_are_refused(change: dict[str, Any], match: str) -> None:
    Placements(**ZERO2)
    with pytest.raises(ConfigError, match=match):
        Placements(**(ZERO2 | change))
