"""Optimizers whose moments are kept in 8 bits: at every layout, in checkpoints, over many steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shoal.checkpoint import load, save
from shoal.config import Config
from shoal.fsdp import sharded_parameters
from shoal.ops import eight_bit
from shoal.plan import resolve_precision
from shoal.training import build_model, build_sharded_optimizer, fill_model
from tests.ranks import RankPool
from tests.training.layouts import (
    Held,
    Whole,
    assert_same_bits,
    at_every_layout,
    gradient,
    layout_config,
    whole_states,
)
from tests.training.tiny import MODEL, make_config
from tests.training.walks import losses_of_walks

NUM_STEPS = 150


def test_every_layout_makes_the_same_bits(tmp_path: Path, ranks: RankPool) -> None:
    found = at_every_layout(tmp_path, ranks, 3, precision={"compute": "fp32", "moments": "8bit"})
    expected = assert_same_bits(found)
    wide = expected["model.layers.0.self_attn.q_proj.weight"]
    assert wide["exp_avg"].dtype == wide["exp_avg_sq"].dtype == torch.uint8
    assert wide["exp_avg_scale"].shape == (66, 1)
    assert expected["model.norm.weight"]["exp_avg"].dtype == torch.float32


def _pass_on(config: Config, source: Path | None, target: Path) -> Held:
    """Load, or make two updates from the start; save; what this rank holds."""
    precision = resolve_precision(config)
    passes = build_model(config, precision, torch.device("cpu"))
    fill_model(passes.model, config)
    optimizer = build_sharded_optimizer(config, passes.model, precision)
    parameters = sharded_parameters(passes.model)
    if source is None:
        for number in range(2):
            for parameter in parameters:
                parameter.local.grad = gradient(parameter, number)
            optimizer.step()
    else:
        load(source, model=passes.model, optimizer=optimizer)
    save(target, 2, model=passes.model, optimizer=optimizer, counters={})
    return [
        (
            p.name,
            p.row_start,
            {"weight": p.local.detach().clone(), **optimizer.state[p.local]},
        )
        for p in parameters
        if p.local.numel()
    ]


def _converted(state: dict[str, torch.Tensor], moments: str) -> dict[str, torch.Tensor]:
    """What a parameter's state becomes in another format."""
    if moments == "8bit" and "exp_avg_scale" in state:
        return state
    made = {key: value for key, value in state.items() if not key.endswith("_scale")}
    for name in ("exp_avg", "exp_avg_sq"):
        signed, value = name == "exp_avg", state[name]
        if value.dtype == torch.uint8:
            value = eight_bit.dequantize(value, state[f"{name}_scale"], signed=signed)
        value = value.float()
        if moments == "8bit" and eight_bit.is_quantized(value.shape):
            made[name], made[f"{name}_scale"] = eight_bit.quantize(value, signed=signed)
        else:
            made[name] = value.bfloat16() if moments == "bf16" else value
    return made


def test_checkpoints_change_layout_and_format(tmp_path: Path, ranks: RankPool) -> None:
    chain = [
        ("two, ZeRO-3", "fp32"),
        ("four, HFSDP and HSDP", "8bit"),
        ("one rank", "8bit"),
        ("two stages", "bf16"),
        ("two that share experts", "8bit"),
        ("two, DDP", "fp32"),
    ]
    source, before = None, dict[str, dict[str, torch.Tensor]]()
    for number, (layout, moments) in enumerate(chain):
        precision = {"compute": "fp32", "moments": moments}
        config = layout_config(tmp_path, layout, precision=precision)
        target = tmp_path / str(number)
        held = ranks.run(config.cluster.workers, _pass_on, config, source, target)
        states: Whole = whole_states(held)
        for name, state in before.items():
            expected = _converted(state, moments)
            assert states[name].keys() == expected.keys()
            for key, value in expected.items():
                assert torch.equal(states[name][key], value), (layout, moments, name, key)
                assert states[name][key].dtype == value.dtype
        source, before = target / "step-00000002", states


def test_training_ends_where_fp32_moments_end(tmp_path: Path, ranks: RankPool) -> None:
    losses = {}
    for moments in ("fp32", "8bit"):
        config = make_config(
            tmp_path,
            model={"config": {**MODEL, "initializer_range": 0.05}},
            precision={"compute": "fp32", "moments": moments},
            optimizer={"lr": 0.003, "weight_decay": 0.1},
            train={"steps": NUM_STEPS, "global_batch": 2},
        )
        steps = ranks.run(1, losses_of_walks, config, NUM_STEPS)[0]
        losses[moments] = sum(steps[-10:]) / 10
        assert losses[moments] < steps[0] / 2
    assert losses["8bit"] == pytest.approx(losses["fp32"], rel=0.01)
