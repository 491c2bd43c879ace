"""Bytes by the formulas of the strategies, for models without any padding."""

from __future__ import annotations

import pytest

from shoal.config import Level
from shoal.plan import Kind, make_plan
from tests.plan.configs import DENSE, config

WIDE = {**DENSE, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
EVEN = {**WIDE, "vocab_size": 512, "num_key_value_heads": 4}
NONE, OPT, GRAD, PARAM = Level


@pytest.mark.parametrize(
    ("outer", "inner", "main", "compute", "gradients"),
    [
        # shares of all parameters; 2 domains of 2 ranks, bf16 compute, fp32 for the rest
        (NONE, NONE, 1, 1, 1),
        (OPT, OPT, 1 / 4, 1, 1 / 4),
        (GRAD, GRAD, 1 / 4, 1, 1 / 4),
        (PARAM, PARAM, 1 / 4, 1 / 4, 1 / 4),
        (NONE, PARAM, 1 / 2, 1 / 2, 1 / 2),
        (OPT, PARAM, 1 / 4, 1 / 2, 1 / 4),
        (OPT, GRAD, 1 / 4, 1, 1 / 4),
        (NONE, OPT, 1 / 2, 1, 1 / 2),
    ],
    ids=str,
)
def test_bytes_at_rest_by_strategy(
    outer: Level, inner: Level, main: float, compute: float, gradients: float
) -> None:
    plan = make_plan(
        config(
            model={"config": EVEN},
            cluster={"workers": 4, "nvlink_domain": 2},
            sharding={"dense": {"outer": outer.value, "inner": inner.value}},
            precision={"compute": "bf16"},
        )
    )
    count = plan.num_parameters
    expected = {
        Kind.MAIN_WEIGHTS: 4 * count * main,
        Kind.COMPUTE_WEIGHTS: 2 * count * compute,
        Kind.GRADIENTS: 4 * count * gradients,
    }
    for memory in plan.memory:
        for kind, num_bytes in expected.items():
            assert memory.num_bytes[kind] == pytest.approx(num_bytes, rel=0.01)
    # Rows are spread unevenly, and no row is missing or held twice among replicas.
    moments = sum(memory.num_bytes[Kind.MOMENTS] for memory in plan.memory)
    assert moments == 8 * count * 4 * main


def test_weights_that_are_their_own_compute_weights_count_once() -> None:
    for levels in ({"outer": "replicate", "inner": "replicate"}, {"inner": "parameters"}):
        plan = make_plan(config(cluster={"workers": 2}, sharding={"dense": levels}))
        assert plan.memory[0].num_bytes[Kind.COMPUTE_WEIGHTS] == 0


def test_whole_weights_of_a_unit_its_surroundings_and_the_next() -> None:
    plan = make_plan(config(model={"config": EVEN}, cluster={"workers": 2}))
    layer = 4 * 64 * 64 + 3 * 64 * 64 + 2 * 64
    root = 512 * 64 + 64
    expected = 4 * (root + 2 * layer)
    assert plan.memory[0].num_bytes[Kind.WHOLE_WEIGHTS] == pytest.approx(expected, rel=0.02)


def test_recompute_trades_activations() -> None:
    deep = {**EVEN, "num_hidden_layers": 8}
    kept, again = (
        make_plan(config(model={"config": deep}, train={"recompute": how})).memory[0]
        for how in ("none", "layer")
    )
    assert again.num_bytes[Kind.ACTIVATIONS] < kept.num_bytes[Kind.ACTIVATIONS] / 2
    assert again.peak < kept.peak and again.at_rest == kept.at_rest
