"""Bytes by the formulas of the strategies, for models without any padding."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from shoal.config import Config, Level, OptimizerSettings
from shoal.models import DecoderConfig, Part, parameter_shapes, split_decoder
from shoal.plan import Kind, make_plan, read_decoder_config, resolve_precision
from shoal.plan.group import Formats, Group
from shoal.plan.groups import decoder_groups
from shoal.plan.memory import update_bytes
from tests.plan.configs import DENSE, EXPERTS, config

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


def test_weights_and_contributions_of_a_unit_its_surroundings_and_its_neighbours() -> None:
    """Of three layers the middle one: the first is on its way, the last one is being reduced."""
    three = {**EVEN, "num_hidden_layers": 3}
    plan = make_plan(config(model={"config": three}, cluster={"workers": 2}))
    layer = 4 * 64 * 64 + 3 * 64 * 64 + 2 * 64
    root = 512 * 64 + 64
    held = plan.memory[0].num_bytes
    assert held[Kind.WHOLE_WEIGHTS] == pytest.approx(4 * (root + 2 * layer), rel=0.02)
    # One made, one on its way, and what peers send of that.
    assert held[Kind.CONTRIBUTIONS] == pytest.approx(4 * (root + 3 * layer), rel=0.02)


def _groups(settings: Config) -> tuple[Group, ...]:
    fp32 = torch.float32
    formats = Formats(main_weights=fp32, compute=fp32, gradients=fp32, reduce=fp32)
    decoder, plan = read_decoder_config(settings.model), make_plan(settings)
    part = Part(layers=range(decoder.num_layers))
    return decoder_groups(decoder, part, settings.sharding, plan.topology, formats)


def test_an_optimizer_of_other_formats_takes_memory_for_its_arithmetic() -> None:
    settings = config(model={"config": {**EVEN, "vocab_size": 2**16}}, data={"seq_len": 2})
    groups = _groups(settings)
    count = sum(group.layout.size for group in groups)
    precision = resolve_precision(settings)
    narrow = replace(precision, moments=torch.bfloat16)
    assert update_bytes(groups, settings.optimizer, precision) == 0
    assert update_bytes(groups, settings.optimizer, narrow) == 4 * 3 * count
    sgd = OptimizerSettings(kind="sgd", momentum=0.9)
    assert update_bytes(groups, sgd, precision) == 4 * 4 * count


def test_recompute_trades_activations() -> None:
    deep = {**EVEN, "num_hidden_layers": 8}
    kept, again = (
        make_plan(config(model={"config": deep}, train={"recompute": how})).memory[0]
        for how in ("none", "layer")
    )
    assert again.num_bytes[Kind.ACTIVATIONS] < kept.num_bytes[Kind.ACTIVATIONS] / 2
    assert again.peak < kept.peak and again.at_rest == kept.at_rest


@pytest.mark.parametrize("tied", [True, False])
def test_the_units_of_a_part_own_what_the_part_has(tied: bool) -> None:
    decoder = DecoderConfig.from_hf({**EXPERTS, "tie_word_embeddings": tied})
    fp32 = torch.float32
    formats = Formats(main_weights=fp32, compute=fp32, gradients=fp32, reduce=fp32)
    plan = make_plan(config(model={"config": EXPERTS}))
    for part in split_decoder(decoder, 3):
        groups = decoder_groups(decoder, part, config().sharding, plan.topology, formats)
        shapes = Counter(shape for group in groups for shape in group.layout.shapes)
        assert shapes == Counter(parameter_shapes(decoder, part).values())
        copies = [group for group in groups if group.is_copy]
        assert len(copies) == (tied and part.is_last)
        experts = [group.unit for group in groups if group.layers == "expert"]
        assert experts == [f"model.layers.{i}.mlp.experts" for i in part.layers if i != 1]
