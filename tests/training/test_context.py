"""Context parallelism against one plain process that sees whole sequences, by weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shoal.config import Config
from shoal.data import IGNORED, Batch
from shoal.fsdp import sharded_parameters
from shoal.models import Decoder, DecoderConfig, initialize
from shoal.plan import resolve_precision, topology_of
from shoal.training import (
    StepMetrics,
    Stepper,
    build_model,
    build_sharded_optimizer,
    fill_model,
)
from tests.ranks import RankPool
from tests.training.tiny import MIXTURE, MODEL, make_config

RATE, NUM_STEPS, SEED, SEQUENCES = 0.1, 3, 7, 12

MODELS: dict[str, dict[str, Any]] = {
    "grouped queries": {**MODEL, "max_position_embeddings": 300},
    "mixture": {**MIXTURE, "max_position_embeddings": 300},
    "window": {
        **MODEL,
        "model_type": "mistral",
        "sliding_window": 20,
        "max_position_embeddings": 300,
    },
}
MODELS["packed"] = MODELS["grouped queries"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One composition."""

    model: str
    length: int
    num_sequences: int
    micro_batch: int
    sections: dict[str, dict[str, Any]]

    @property
    def settings(self) -> Config:
        sections: dict[str, Any] = {
            "model": {"config": MODELS[self.model]},
            "run": {"name": "run", "dir": "runs", "seed": SEED},
            "optimizer": {"kind": "sgd", "lr": RATE},
            **self.sections,
        }
        return make_config(Path("."), **sections)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a run left behind."""

    steps: list[StepMetrics]
    weights: list[tuple[str, int, torch.Tensor]]
    """Name, first row and rows of each parameter that the rank holds."""


def sequences(cell: Cell, step: int) -> Batch:
    """All sequences of a step: some with few labels, one with none, packed where asked for."""
    draw = torch.Generator().manual_seed(100 * cell.length + step)
    shape = (cell.num_sequences, cell.length)
    tokens = torch.randint(0, 257, shape, generator=draw)
    labels = torch.randint(0, 257, shape, generator=draw)
    labels[0, cell.length // 3 :] = IGNORED
    labels[1] = IGNORED
    documents = torch.zeros_like(tokens)
    if cell.model == "packed":
        starts = torch.rand(shape, generator=draw) < 4 / cell.length
        starts[:, 0] = False
        starts[2] = False  # this sequence is one document
        documents = starts.long().cumsum(dim=1)
    index = torch.arange(cell.length).expand(shape)
    first = torch.ones(shape, dtype=torch.bool)
    first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    positions = index - torch.where(first, index, 0).cummax(dim=1).values
    return Batch(tokens=tokens, labels=labels, positions=positions, documents=documents)


def rows(batch: Batch, start: int, stop: int) -> Batch:
    return Batch(
        tokens=batch.tokens[start:stop],
        labels=batch.labels[start:stop],
        positions=batch.positions[start:stop],
        documents=batch.documents[start:stop],
    )


@cache
def reference(model: str, length: int, num_sequences: int) -> tuple[Any, dict[str, torch.Tensor]]:
    """Loss, load-balancing loss and norm of each step, and the weights afterwards."""
    cell = Cell(model=model, length=length, num_sequences=num_sequences, micro_batch=1, sections={})
    decoder = Decoder(DecoderConfig.from_hf(MODELS[model]), torch.float32)
    initialize(decoder, SEED)
    experts = decoder.config.experts
    steps = []
    for step in range(NUM_STEPS):
        batch = sequences(cell, step)
        output = decoder(
            batch.tokens,
            positions=batch.positions,
            documents=batch.documents,
            labels=batch.labels,
        )
        assert output.loss_sum is not None
        loss = total = output.loss_sum / batch.num_labels
        auxiliary = None
        if output.auxiliary is not None:
            assert experts is not None
            auxiliary = output.auxiliary / num_sequences
            total = loss + experts.balance_coefficient * auxiliary
        decoder.zero_grad()
        total.backward()
        gradients = [p.grad for p in decoder.parameters() if p.grad is not None]
        norm = torch.stack([g.double().square().sum() for g in gradients]).sum().sqrt()
        with torch.no_grad():
            for parameter in decoder.parameters():
                if parameter.grad is not None:
                    parameter.sub_(RATE * parameter.grad)
        shown = None if auxiliary is None else auxiliary.item()
        steps.append((loss.item(), shown, norm.item()))
    return steps, {name: value.detach() for name, value in decoder.named_parameters()}


def run_cells(cells: list[Cell]) -> list[Outcome]:
    return [run_cell(cell) for cell in cells]


def run_cell(cell: Cell) -> Outcome:
    """Some steps of this rank."""
    config = cell.settings
    topology, precision = topology_of(config), resolve_precision(config)
    passes = build_model(config, precision, torch.device("cpu"))
    model = passes.model
    fill_model(model, config)
    optimizer = build_sharded_optimizer(config, model, precision)
    stepper = Stepper(
        passes,
        optimizer,
        settings=config.optimizer,
        num_steps=config.train.steps,
        readers=topology.context * topology.pipeline,
    )
    place = topology.coordinates(dist.get_rank()).data
    share = cell.num_sequences // topology.data

    def microbatches(step: int) -> Iterator[Batch]:
        batch = sequences(cell, step)
        for start in range(place * share, (place + 1) * share, cell.micro_batch):
            yield rows(batch, start, start + cell.micro_batch)

    steps = [stepper.step(step, list(microbatches(step))) for step in range(NUM_STEPS)]
    held = [(p.name, p.row_start, p.local.detach().clone()) for p in sharded_parameters(model)]
    return Outcome(steps=steps, weights=held)


def check(cell: Cell, outcomes: list[Outcome]) -> None:
    steps, weights = reference(cell.model, cell.length, cell.num_sequences)
    covered = 0
    for outcome in outcomes:
        for step, (made, (loss, auxiliary, norm)) in enumerate(
            zip(outcome.steps, steps, strict=True)
        ):
            what = (cell, step)
            assert made.loss == pytest.approx(loss, rel=1e-5), what
            assert made.grad_norm == pytest.approx(norm, rel=1e-6), what
            assert made.auxiliary_loss == (
                None if auxiliary is None else pytest.approx(auxiliary, rel=1e-5)
            ), what
            assert made.tokens == cell.num_sequences * cell.length, what
            assert made.labels == sequences(cell, step).num_labels, what
        for name, start, local in outcome.weights:
            expected = weights[name][start : start + len(local)]
            torch.testing.assert_close(
                local, expected, rtol=1e-5, atol=1e-6, msg=lambda text: f"{cell}: {text}"
            )
            covered += local.numel()
    assert covered >= sum(value.numel() for value in weights.values())


def check_all(ranks: RankPool, world_size: int, cells: list[Cell]) -> None:
    by_rank = ranks.run(world_size, run_cells, cells)
    for index, cell in enumerate(cells):
        check(cell, [outcomes[index] for outcomes in by_rank])


def cluster(world_size: int, context: int, exchange: str, **more: Any) -> dict[str, Any]:
    return {
        "cluster": {"workers": world_size, "device": "cpu", **more},
        "parallel": {"context": context, "context_exchange": exchange},
    }


@pytest.mark.parametrize(
    ("size", "exchange"),
    [(1, "gather"), (2, "gather"), (2, "ring"), (4, "gather"), (4, "ring")],
)
@pytest.mark.parametrize("model", MODELS)
def test_equals_one_process(ranks: RankPool, model: str, size: int, exchange: str) -> None:
    cells = [
        Cell(
            model=model,
            length=length,
            num_sequences=3,
            micro_batch=3 // num_microbatches,
            sections=cluster(size, size, exchange),
        )
        for length in (257, 65, 2 * size + 1)
        for num_microbatches in (1, 3)
    ]
    check_all(ranks, size, cells)


@pytest.mark.parametrize("exchange", ["gather", "ring"])
@pytest.mark.parametrize("domain", [2, 4])
def test_beside_data_parallel_ranks(ranks: RankPool, domain: int, exchange: str) -> None:
    """Whose sequences, labels and routing differ; HFSDP over domains, and experts apart."""
    levels = {"outer": "optimizer", "inner": "parameters"}
    cells = [
        Cell(
            model=model,
            length=65,
            num_sequences=SEQUENCES,
            micro_batch=micro_batch,
            sections={
                **cluster(4, 2, exchange, nvlink_domain=domain),
                "sharding": {"dense": levels, "expert": {**levels, "outer": "parameters"}},
            },
        )
        for model in ("packed", "mixture")
        for micro_batch in (2, 6)
    ]
    check_all(ranks, 4, cells)


@pytest.mark.parametrize("exchange", ["gather", "ring"])
@pytest.mark.parametrize(("size", "expert"), [(2, 2), (2, 4), (4, 2)])
def test_beside_shared_experts(ranks: RankPool, size: int, expert: int, exchange: str) -> None:
    """Ranks that share a sequence share experts too, with each other or with others."""
    sections = cluster(4, size, exchange)
    sections["parallel"]["expert"] = expert
    cells = [
        Cell(
            model="mixture",
            length=65,
            num_sequences=SEQUENCES,
            micro_batch=micro_batch,
            sections=sections,
        )
        for micro_batch in (2, 6)
    ]
    check_all(ranks, 4, cells)


@pytest.mark.parametrize("exchange", ["gather", "ring"])
def test_recomputed_layers_give_the_same_bits(ranks: RankPool, exchange: str) -> None:
    def outcomes(recompute: str) -> list[Outcome]:
        cell = Cell(
            model="mixture",
            length=65,
            num_sequences=3,
            micro_batch=1,
            sections={
                **cluster(4, 4, exchange),
                "train": {"steps": NUM_STEPS, "recompute": recompute},
            },
        )
        return ranks.run(4, run_cell, cell)

    for plain, again in zip(outcomes("none"), outcomes("layer"), strict=True):
        assert [step.loss for step in plain.steps] == [step.loss for step in again.steps]
        for (_, _, local), (_, _, other) in zip(plain.weights, again.weights, strict=True):
            assert torch.equal(local, other)
