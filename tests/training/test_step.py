"""One step over uneven labels: every number of ranks against a single process, by weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shoal.config import Config
from shoal.data import IGNORED, Batch
from shoal.fsdp import sharded_parameters
from shoal.models import Decoder, initialize
from shoal.plan import read_decoder_config, resolve_precision
from shoal.training import Stepper, build_model, build_sharded_optimizer, fill_model
from tests.ranks import RankPool
from tests.training.tiny import MIXTURE, MODEL, make_config, part_of

SEQUENCES, LENGTH = 4, 64
RATE, NUM_STEPS = 0.5, 3

LABELS = {
    "63, 1, none": [63, 1, 0, 0],
    "one rank has none": [0, 0, 40, 7],
    "nobody has one": [0, 0, 0, 0],
}
"""Labels of each of the four sequences."""


def _sequences(counts: list[int], step: int) -> Batch:
    draw = torch.Generator().manual_seed(11 + step)
    tokens = torch.randint(0, 257, (SEQUENCES, LENGTH), generator=draw)
    labels = torch.full_like(tokens, IGNORED)
    for row, count in enumerate(counts):
        places = torch.randperm(LENGTH, generator=draw)[:count]
        labels[row, places] = (tokens[row, places] + 1) % 257
    positions = torch.arange(LENGTH).expand(SEQUENCES, -1)
    return Batch(
        tokens=tokens, labels=labels, positions=positions, documents=torch.zeros_like(tokens)
    )


def _reference(config: Config, counts: list[int]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of one plain process that sees the whole batch at once."""
    model = Decoder(read_decoder_config(config.model), torch.float32)
    initialize(model, config.run.seed)
    experts = model.config.experts
    coefficient = experts.balance_coefficient if experts is not None else 0.0
    losses = []
    for step in range(NUM_STEPS):
        batch = _sequences(counts, step)
        output = model(batch.tokens, labels=batch.labels)
        assert output.loss_sum is not None
        mean = output.loss_sum / max(int((batch.labels != IGNORED).sum()), 1)
        total = mean
        if output.auxiliary is not None:
            total = mean + coefficient * output.auxiliary / SEQUENCES
        model.zero_grad()
        total.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(RATE * parameter.grad)
        losses.append(mean.item())
    return losses, {name: value.detach() for name, value in model.named_parameters()}


def _steps(
    config: Config, counts: list[int], micro_batch: int
) -> tuple[list[float], list[tuple[str, int, torch.Tensor]]]:
    """Losses, and the rows that this rank holds, after some steps."""
    rank, share = dist.get_rank(), SEQUENCES // dist.get_world_size()
    precision = resolve_precision(config)
    passes = build_model(config, precision, torch.device("cpu"))
    model = passes.model
    fill_model(model, config)
    optimizer = build_sharded_optimizer(config, model, precision)
    stepper = Stepper(passes, optimizer, settings=config.optimizer, num_steps=config.train.steps)

    def microbatches(step: int) -> Iterator[Batch]:
        batch = _sequences(counts, step)
        for start in range(rank * share, (rank + 1) * share, micro_batch):
            yield part_of(batch, start, start + micro_batch)

    losses = [stepper.step(step, list(microbatches(step))).loss for step in range(NUM_STEPS)]
    held = [(p.name, p.row_start, p.local.detach().clone()) for p in sharded_parameters(model)]
    return losses, held


CASES = [("dense", labels) for labels in LABELS] + [("mixture", "63, 1, none")]


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(("kind", "labels"), CASES)
def test_tokens_weigh_the_same_wherever_they_are(
    tmp_path: Any, ranks: RankPool, kind: str, labels: str, world_size: int
) -> None:
    config = make_config(
        tmp_path,
        model={"config": MODEL if kind == "dense" else MIXTURE},
        cluster={"workers": world_size, "device": "cpu", "nvlink_domain": max(world_size // 2, 1)},
        sharding={"dense": {"outer": "optimizer", "inner": "parameters"}},
        optimizer={"kind": "sgd", "lr": RATE},
    )
    losses, weights = _reference(config, LABELS[labels])
    results = ranks.run(world_size, _steps, config, LABELS[labels], 1)
    for rank_losses, held in results:
        assert rank_losses == pytest.approx(losses, rel=1e-5)
        for name, row_start, rows in held:
            expected = weights[name][row_start : row_start + len(rows)]
            torch.testing.assert_close(rows, expected, rtol=1e-5, atol=1e-6)
    covered = sum(rows.numel() for _, held in results for _, _, rows in held)
    assert covered >= sum(value.numel() for value in weights.values())


def test_microbatches_change_nothing(tmp_path: Any, ranks: RankPool) -> None:
    config = make_config(tmp_path, optimizer={"kind": "sgd", "lr": RATE})
    counts = LABELS["63, 1, none"]
    losses, weights = _reference(config, counts)
    for micro_batch in (1, 2, 4):
        rank_losses, held = ranks.run(1, _steps, config, counts, micro_batch)[0]
        assert rank_losses == pytest.approx(losses, rel=1e-5)
        for name, _, rows in held:
            torch.testing.assert_close(rows, weights[name], rtol=1e-5, atol=1e-6)
