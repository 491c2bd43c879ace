"""Steps with experts shared by ranks against a single process: losses, norms, weights."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shoal.config import Config
from shoal.data import IGNORED, Batch
from shoal.fsdp import sharded_parameters
from shoal.models import Decoder, DecoderConfig, InitialWeights, initialize, parameter_shapes
from shoal.plan import resolve_precision
from shoal.training import Stepper, build_model, build_sharded_optimizer, fill_model
from tests.ranks import RankPool
from tests.training.tiny import MIXTURE, make_config

LENGTH, RATE, NUM_STEPS, SEED = 11, 0.1, 3, 7
INITIALIZER_RANGE = 0.1
MODEL = {**MIXTURE, "num_experts": 8, "initializer_range": INITIALIZER_RANGE}

Held = list[tuple[str, tuple[int, ...], int, torch.Tensor]]
"""Name, whole shape, first row and rows of what a rank holds."""


def sequence(number: int, step: int) -> Batch:
    """One sequence of a step; every third has few labels."""
    draw = torch.Generator().manual_seed(1000 * step + number)
    tokens = torch.randint(0, 257, (1, LENGTH + 1), generator=draw)
    labels = tokens[:, 1:].clone()
    if number % 3 == 0:
        labels[:, 2 + number % 2 :] = IGNORED
    return Batch(
        tokens=tokens[:, :-1],
        labels=labels,
        positions=torch.arange(LENGTH).unsqueeze(0),
        documents=torch.zeros(1, LENGTH, dtype=torch.int64),
    )


@cache
def _reference(num_sequences: int) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses, norms and weights of one plain process that sees all sequences at once."""
    model = Decoder(DecoderConfig.from_hf(MODEL), torch.float32)
    initialize(model, SEED)
    assert model.config.experts is not None
    coefficient = model.config.experts.balance_coefficient
    losses, norms = [], []
    for step in range(NUM_STEPS):
        batches = [sequence(number, step) for number in range(num_sequences)]
        tokens = torch.cat([batch.tokens for batch in batches])
        labels = torch.cat([batch.labels for batch in batches])
        output = model(tokens, labels=labels)
        assert output.loss_sum is not None and output.auxiliary is not None
        mean = output.loss_sum / (labels != IGNORED).sum()
        model.zero_grad()
        (mean + coefficient * output.auxiliary / num_sequences).backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        norms.append(torch.cat([g.flatten().double() for g in gradients.values()]).norm().item())
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.sub_(RATE * gradients[name])
        losses.append(mean.item())
    return losses, norms, {name: value.detach() for name, value in model.named_parameters()}


def _steps(config: Config, num_microbatches: int) -> tuple[list[float], list[float], Held]:
    """Losses, norms, and the rows that this rank holds in the end."""
    rank = dist.get_rank()
    precision = resolve_precision(config)
    passes = build_model(config, precision, torch.device("cpu"))
    model = passes.model
    fill_model(model, config)
    optimizer = build_sharded_optimizer(config, model, precision)
    stepper = Stepper(passes, optimizer, settings=config.optimizer, num_steps=config.train.steps)

    def microbatches(step: int) -> Iterator[Batch]:
        for index in range(num_microbatches):
            yield sequence(rank * num_microbatches + index, step)

    steps = [stepper.step(step, microbatches(step)) for step in range(NUM_STEPS)]
    held = [
        (p.name, tuple(p.shape), p.row_start, p.local.detach().clone())
        for p in sharded_parameters(model)
    ]
    return [step.loss for step in steps], [step.grad_norm for step in steps], held


DDP = {"outer": "replicate", "inner": "replicate"}
ZERO1 = {"outer": "optimizer", "inner": "optimizer"}
ZERO3 = {"outer": "parameters", "inner": "parameters"}
HSDP = {"outer": "replicate", "inner": "parameters"}
HFSDP = {"outer": "optimizer", "inner": "parameters"}

CELLS = [
    # ranks, ranks of a domain, expert degree, dense, expert, microbatches
    (1, 1, 1, ZERO3, ZERO3, 3),
    (2, 2, 1, ZERO1, ZERO3, 1),
    (2, 2, 2, DDP, DDP, 1),
    (2, 2, 2, ZERO1, ZERO3, 3),
    (2, 2, 2, ZERO3, DDP, 1),
    (4, 4, 1, ZERO3, ZERO3, 1),
    (4, 2, 1, HFSDP, HSDP, 3),
    (4, 4, 2, ZERO1, ZERO1, 1),
    (4, 4, 2, ZERO3, ZERO3, 3),
    (4, 2, 2, HSDP, HFSDP, 1),
    (4, 2, 2, HFSDP, DDP, 3),
    (4, 4, 4, DDP, ZERO3, 1),
    (4, 4, 4, ZERO3, ZERO1, 3),
    (4, 4, 4, HFSDP, ZERO3, 1),
]
RECOMPUTED = [cell for cell in CELLS if cell[2] > 1 and cell[5] > 1]


@pytest.mark.parametrize(
    ("size", "domain", "degree", "dense", "expert", "microbatches", "recompute"),
    [*((*cell, "none") for cell in CELLS), *((*cell, "layer") for cell in RECOMPUTED)],
)
def test_shared_experts_train_like_one_process(
    tmp_path: Any,
    ranks: RankPool,
    size: int,
    domain: int,
    degree: int,
    dense: dict[str, str],
    expert: dict[str, str],
    microbatches: int,
    recompute: str,
) -> None:
    config = make_config(
        tmp_path,
        run={"seed": SEED},
        model={"config": MODEL},
        cluster={"workers": size, "device": "cpu", "nvlink_domain": domain},
        parallel={"expert": degree},
        sharding={"dense": dense, "expert": expert},
        optimizer={"kind": "sgd", "lr": RATE},
        train={"recompute": recompute},
    )
    losses, norms, weights = _reference(size * microbatches)
    shapes = parameter_shapes(DecoderConfig.from_hf(MODEL))
    start = InitialWeights(shapes, SEED, INITIALIZER_RANGE)
    covered = dict.fromkeys(weights, 0)
    for rank_losses, rank_norms, held in ranks.run(size, _steps, config, microbatches):
        assert rank_losses == pytest.approx(losses, rel=1e-5)
        assert rank_norms == pytest.approx(norms, rel=1e-6)
        for name, shape, row_start, rows in held:
            assert shape == weights[name].shape
            row_stop = row_start + len(rows)
            expected = weights[name][row_start:row_stop]
            torch.testing.assert_close(rows, expected, rtol=1e-5, atol=1e-6)
            change = expected - start.rows(name, row_start, row_stop)
            assert (rows - expected).norm() <= 1e-5 * change.norm() + 1e-7, name
            covered[name] += len(rows)
    assert all(covered[name] >= len(value) for name, value in weights.items())
