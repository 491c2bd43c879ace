"""Experts saved by any number of ranks that share them, loaded by any other, and exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shoal.checkpoint import CheckpointWeights, export, hf_attachments, load, save
from shoal.config import Config
from shoal.data import Batch
from shoal.fsdp import sharded_parameters
from shoal.models import Decoder, DecoderConfig, HFWeights, load_weights
from shoal.plan import resolve_precision
from shoal.training import Stepper, build_model, build_sharded_optimizer, fill_model
from tests.checkpoint import toy
from tests.parallel.matrix import MODELS, sequences
from tests.ranks import RankPool
from tests.training.tiny import make_config, part_of

MODEL = {**MODELS["mixture"], "num_hidden_layers": 2}
LENGTH = 11

ZERO1 = {"outer": "optimizer", "inner": "optimizer"}
ZERO3 = {"outer": "parameters", "inner": "parameters"}
HFSDP = {"outer": "optimizer", "inner": "parameters"}

LAYOUTS: list[tuple[int, int, int, dict[str, str], dict[str, str]]] = [
    # ranks, ranks of a domain, expert degree, dense, expert
    (2, 2, 2, ZERO1, ZERO3),
    (1, 1, 1, ZERO3, ZERO3),
    (4, 4, 4, ZERO3, ZERO1),
    (4, 2, 2, HFSDP, HFSDP),
    (2, 1, 1, ZERO3, ZERO1),
]
"""Each loads what the one before saved."""


def _sequence(number: int, step: int) -> Batch:
    return part_of(sequences("mixture", LENGTH, 6, step), number, number + 1)


def _config(folder: Path, number: int) -> Config:
    size, domain, degree, dense, expert = LAYOUTS[number]
    return make_config(
        folder,
        run={"seed": number},
        model={"config": MODEL},
        cluster={"workers": size, "device": "cpu", "nvlink_domain": domain},
        parallel={"expert": degree},
        sharding={"dense": dense, "expert": expert},
    )


def _pass_on(config: Config, source: Path | None, target: Path) -> tuple[Any, torch.Tensor]:
    """Load, or train two steps from the start; save; what is held here, and logits."""
    precision = resolve_precision(config)
    passes = build_model(config, precision, torch.device("cpu"))
    model = passes.model
    optimizer = build_sharded_optimizer(config, model, precision)
    fill_model(model, config)
    if source is None:
        stepper = Stepper(passes, optimizer, settings=config.optimizer, num_steps=2)
        for step in range(2):
            stepper.step(step, [_sequence(dist.get_rank(), step)])
    else:
        with torch.no_grad():
            for parameter in sharded_parameters(model):
                parameter.local.fill_(torch.nan)
        load(source, model=model, optimizer=optimizer)
    attachments = hf_attachments(MODEL)
    save(target, 2, model=model, optimizer=optimizer, counters={"step": 2}, attachments=attachments)
    with torch.no_grad():
        logits = model.parts[0](_sequence(5, 0).tokens).logits
    assert logits is not None
    return toy.held_rows(
        toy.Run(model=model, optimizer=optimizer, context=passes.contexts[0])
    ), logits


@pytest.fixture(scope="module")
def passed_on(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, Any]]:
    """For each layout, its checkpoint and what its ranks held."""
    folder = tmp_path_factory.mktemp("experts")
    results, source = [], None
    for number, (size, *_) in enumerate(LAYOUTS):
        target = folder / str(number)
        found = ranks.run(size, _pass_on, _config(folder, number), source, target)
        source = target / "step-00000002"
        results.append((source, found))
    return results


def test_every_degree_holds_the_same_bits(passed_on: list[tuple[Path, Any]]) -> None:
    states = [toy.whole([held for held, _ in found]) for _, found in passed_on]
    experts = states[0]["model.layers.0.mlp.experts.gate_up_proj"]
    assert experts["weight"].shape == experts["exp_avg"].shape == (8 * 2 * 30, 66)
    for state in states[1:]:
        toy.assert_equal_states(state, states[0])


def test_every_degree_gives_the_same_logits(passed_on: list[tuple[Path, Any]]) -> None:
    plain = Decoder(DecoderConfig.from_hf(MODEL), torch.float32)
    load_weights(plain, CheckpointWeights(passed_on[0][0]))
    expected = plain(_sequence(5, 0).tokens).logits
    assert expected is not None
    for _, found in passed_on:
        for _, logits in found:
            torch.testing.assert_close(logits, expected.detach(), rtol=1e-5, atol=1e-5)


def test_a_file_of_shared_experts_holds_each_of_them(
    passed_on: list[tuple[Path, Any]], tmp_path: Path
) -> None:
    path, found = passed_on[0]
    state = toy.whole([held for held, _ in found])
    name = "model.layers.1.mlp.experts.down_proj"
    rows = CheckpointWeights(path).rows(name, 0, 8 * 66)
    assert torch.equal(rows, state[name]["weight"])
    experts = rows.chunk(8)
    assert not any(torch.equal(a, b) for i, a in enumerate(experts) for b in experts[:i])
    export(path, tmp_path / "model", dtype=torch.float32)
    exported = HFWeights(tmp_path / "model")
    for parameter, shape in exported.shapes().items():
        assert torch.equal(exported.rows(parameter, 0, shape[0]), state[parameter]["weight"])
