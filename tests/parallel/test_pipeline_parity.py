"""Training in stages against one plain process: losses, norms and weights, layout by layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from shoal.config import Config
from shoal.data import IGNORED, Batch
from shoal.errors import WorkError
from shoal.fsdp import sharded_parameters, sync_weights
from shoal.models import Decoder, initialize
from shoal.plan import read_decoder_config, resolve_precision, topology_of
from shoal.training import Stepper, build_model, build_sharded_optimizer, fill_model
from tests.ranks import RankPool
from tests.training.tiny import MIXTURE, MODEL, make_config

LENGTH, RATE, NUM_STEPS = 17, 0.1, 3


class Layout(NamedTuple):
    """Ranks and what they do."""

    stages: int
    data: int
    virtual: int
    microbatches: int
    level: str = "parameters"
    recompute: str = "none"
    context: int = 1
    expert: int = 1

    @property
    def sequences(self) -> int:
        """Sequences of a step."""
        return self.data * self.microbatches

    def sections(self, model: dict[str, Any], **optimizer: Any) -> dict[str, Any]:
        """Sections of the configuration."""
        levels = {"outer": "replicate", "inner": self.level}
        return {
            "model": {"config": model},
            "cluster": {"workers": self.stages * self.data * self.context, "device": "cpu"},
            "parallel": {
                "pipeline": self.stages,
                "virtual_stages": self.virtual,
                "context": self.context,
                "expert": self.expert,
            },
            "sharding": {"dense": levels, "expert": levels},
            "train": {"global_batch": self.sequences, "recompute": self.recompute},
            "optimizer": {"kind": "sgd", "lr": RATE, **optimizer},
        }


class Outcome(NamedTuple):
    """What steps did."""

    losses: list[float]
    auxiliary: list[float | None]
    norms: list[float]


def sequences(count: int, step: int) -> Batch:
    """``count`` sequences, each with its own number of labels, one of them without any."""
    draw = torch.Generator().manual_seed(11 + step)
    tokens = torch.randint(0, 257, (count, LENGTH), generator=draw)
    labels = torch.randint(0, 257, (count, LENGTH), generator=draw)
    for row in range(count):
        labels[row, : 5 * row if row != 2 else LENGTH] = IGNORED
    positions = torch.arange(LENGTH).expand(count, -1)
    return Batch(
        tokens=tokens, labels=labels, positions=positions, documents=torch.zeros_like(tokens)
    )


def _row(batch: Batch, row: int) -> Batch:
    return Batch(
        tokens=batch.tokens[row : row + 1],
        labels=batch.labels[row : row + 1],
        positions=batch.positions[row : row + 1],
        documents=batch.documents[row : row + 1],
    )


def reference(config: Config, count: int) -> tuple[Outcome, dict[str, torch.Tensor]]:
    """One plain process, a sequence at a time; and how its weights changed."""
    model = Decoder(read_decoder_config(config.model), torch.float32)
    initialize(model, config.run.seed)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    experts = model.config.experts
    outcome = Outcome([], [], [])
    for step in range(NUM_STEPS):
        batch = sequences(count, step)
        model.zero_grad()
        loss, auxiliary = 0.0, 0.0
        for row in range(count):
            output = model(batch.tokens[row : row + 1], labels=batch.labels[row : row + 1])
            total = mean = output.loss_sum / max(batch.num_labels, 1)
            if experts is not None:
                total = mean + experts.balance_coefficient * output.auxiliary / count
                auxiliary += output.auxiliary.item() / count
            total.backward()
            loss += mean.item()
        gradients = [p.grad.double() for p in model.parameters() if p.grad is not None]
        norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
        clip = config.optimizer.clip
        factor = 1.0 if clip is None else min(clip / (norm.item() + 1e-6), 1.0)
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(RATE * factor * parameter.grad)
        outcome.losses.append(loss)
        outcome.auxiliary.append(None if experts is None else auxiliary)
        outcome.norms.append(norm.item())
    return outcome, {n: p.detach() - before[n] for n, p in model.named_parameters()}


Held = list[tuple[str, int, torch.Tensor, bool]]
"""Parameters: name, first row, how the rows changed, whether this rank stands for them."""


def steps(config: Config) -> tuple[Outcome, Held]:
    """The same in stages, on one rank of many."""
    topology = topology_of(config)
    assert config.train.global_batch is not None
    count = config.train.global_batch
    share = count // topology.data
    place = topology.coordinates(dist.get_rank()).data
    precision = resolve_precision(config)
    passes = build_model(config, precision, torch.device("cpu"))
    fill_model(passes.model, config)
    before = [parameter.local.detach().clone() for parameter in sharded_parameters(passes.model)]
    optimizer = build_sharded_optimizer(config, passes.model, precision)
    stepper = Stepper(
        passes,
        optimizer,
        settings=config.optimizer,
        num_steps=NUM_STEPS,
        readers=topology.pipeline * topology.context,
    )
    outcome = Outcome([], [], [])
    for step in range(NUM_STEPS):
        batch = sequences(count, step)
        rows = range(place * share, (place + 1) * share)
        metrics = stepper.step(step, [_row(batch, row) for row in rows])
        outcome.losses.append(metrics.loss)
        outcome.auxiliary.append(metrics.auxiliary_loss)
        outcome.norms.append(metrics.grad_norm)
    after = sharded_parameters(passes.model)
    held = [
        (p.name, p.row_start, p.local.detach() - old, p.primary)
        for p, old in zip(after, before, strict=True)
    ]
    return outcome, held


def _each(configs: list[Config]) -> list[tuple[Outcome, Held]]:
    return [steps(config) for config in configs]


def check(config: Config, results: list[tuple[Outcome, Held]]) -> None:
    """What the ranks did is what one process does, and they agree to the bit."""
    assert config.train.global_batch is not None
    expected, changes = reference(config, config.train.global_batch)
    scale = max(change.abs().max().item() for change in changes.values())
    # A weight near one, as of a norm, is known to a 2**-23 at best, and so is its change.
    atol = max(1e-5 * scale, 2.0**-23)
    covered = dict.fromkeys(changes, 0)
    for outcome, held in results:
        assert outcome == results[0][0], "every rank reports the same"
        assert outcome.losses == pytest.approx(expected.losses, rel=1e-5)
        assert outcome.norms == pytest.approx(expected.norms, rel=1e-6)
        for found, wanted in zip(outcome.auxiliary, expected.auxiliary, strict=True):
            assert (found is None) == (wanted is None)
            assert found is None or found == pytest.approx(wanted, rel=1e-5)
        for name, row_start, rows, is_primary in held:
            wanted_rows = changes[name][row_start : row_start + len(rows)]
            torch.testing.assert_close(rows, wanted_rows, rtol=1e-5, atol=atol)
            covered[name] += rows.numel() if is_primary else 0
    assert covered == {name: change.numel() for name, change in changes.items()}


def _model(kind: str, layers: int, *, tied: bool) -> dict[str, Any]:
    model: dict[str, Any] = {
        **(MIXTURE if kind == "mixture" else MODEL),
        "num_hidden_layers": layers,
    }
    if kind == "mixture":
        model["mlp_only_layers"] = [0]  # so that a first stage may have no experts
    return {**model, "tie_word_embeddings": tied}


MORE = [
    Layout(2, 2, 1, 3, "replicate"),
    Layout(2, 2, 1, 3, "optimizer"),
    Layout(2, 2, 2, 3, "gradients"),
    Layout(2, 2, 1, 2, "parameters", "layer"),
]
TWO = [Layout(2, 1, v, m) for v in (1, 2) for m in (1, 3, 4)]
FOUR = [Layout(2, 2, v, m) for v in (1, 2) for m in (1, 3, 4)]
FOUR += [Layout(4, 1, v, m) for v in (1, 2) for m in (1, 3, 4)]


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", ["dense", "mixture"])
@pytest.mark.parametrize("layouts", [TWO, FOUR], ids=["two ranks", "four ranks"])
def test_stages_train_as_one_process(
    tmp_path: Path, ranks: RankPool, layouts: list[Layout], kind: str, tied: bool
) -> None:
    configs = []
    for layout in layouts:
        layers = max(5, layout.stages * layout.virtual + 1)  # never as many on each stage
        configs.append(make_config(tmp_path, **layout.sections(_model(kind, layers, tied=tied))))
    by_rank = ranks.run(configs[0].cluster.workers, _each, configs)
    for index, config in enumerate(configs):
        check(config, [results[index] for results in by_rank])


@pytest.mark.parametrize("kind", ["dense", "mixture"])
def test_other_placements_recomputation_and_clipping(
    tmp_path: Path, ranks: RankPool, kind: str
) -> None:
    configs = [
        make_config(tmp_path, **layout.sections(_model(kind, 5, tied=True), clip=0.5))
        for layout in MORE
    ]
    by_rank = ranks.run(4, _each, configs)
    for index, config in enumerate(configs):
        check(config, [results[index] for results in by_rank])
        held = [
            (name, row, change) for results in by_rank for name, row, change, _ in results[index][1]
        ]
        _assert_copies_are_equal(held)


def test_stages_share_experts_and_sequences(tmp_path: Path, ranks: RankPool) -> None:
    layouts = [
        Layout(2, 2, 1, 3, expert=2),
        Layout(2, 1, 2, 3, context=2),
        Layout(2, 1, 1, 2, "optimizer", context=2, expert=2),
    ]
    configs = [
        make_config(tmp_path, **layout.sections(_model("mixture", 5, tied=True)))
        for layout in layouts
    ]
    by_rank = ranks.run(4, _each, configs)
    for index, config in enumerate(configs):
        check(config, [results[index] for results in by_rank])


def _assert_copies_are_equal(held: list[tuple[str, int, torch.Tensor]]) -> None:
    """Ranks with the same rows of a parameter, a tied table on both ends too, have equal bits."""
    seen: dict[tuple[str, int], torch.Tensor] = {}
    for name, row_start, change in held:
        if len(change):
            assert torch.equal(seen.setdefault((name, row_start), change), change), name


def _spoiled(config: Config) -> str:
    """What a rank says when one sequence makes the loss of the last stage infinite."""
    precision = resolve_precision(config)
    passes = build_model(config, precision, torch.device("cpu"))
    fill_model(passes.model, config)
    with torch.no_grad():
        for parameter in sharded_parameters(passes.model):
            if parameter.name == "model.norm.weight":
                parameter.local.fill_(torch.inf)
    sync_weights(passes.model)
    optimizer = build_sharded_optimizer(config, passes.model, precision)
    stepper = Stepper(passes, optimizer, settings=config.optimizer, num_steps=1, readers=2)
    try:
        stepper.step(0, [_row(sequences(1, 0), 0)])
    except WorkError as error:
        return str(error)
    return "nothing"


def test_every_stage_refuses_a_loss_that_is_not_finite(tmp_path: Path, ranks: RankPool) -> None:
    layout = Layout(2, 1, 1, 1)
    config = make_config(tmp_path, **layout.sections(_model("dense", 2, tied=False)))
    for message in ranks.run(2, _spoiled, config):
        assert "Step 1: the loss is" in message
