"""Something that a tiny decoder can learn in a few steps, and its losses on the way."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shoal.config import Config
from shoal.data import Batch
from shoal.plan import resolve_precision
from shoal.training import Stepper, build_model, build_sharded_optimizer, fill_model


def walk(number: int, length: int) -> Batch:
    """A walk over 257 tokens that goes one of three ways from each: something to learn."""
    draw = torch.Generator().manual_seed(number)
    steps = torch.tensor([1, 5, 31])[torch.randint(0, 3, (length + 1,), generator=draw)]
    tokens = (steps.cumsum(0) % 257).unsqueeze(0)
    return Batch(
        tokens=tokens[:, :-1],
        labels=tokens[:, 1:],
        positions=torch.arange(length).unsqueeze(0),
        documents=torch.zeros(1, length, dtype=torch.int64),
    )


def losses_of_walks(config: Config, num_steps: int) -> list[float]:
    """Losses of a rank that reads two walks of 31 tokens a step."""
    precision = resolve_precision(config)
    passes = build_model(config, precision, torch.device("cpu"))
    fill_model(passes.model, config)
    optimizer = build_sharded_optimizer(config, passes.model, precision)
    stepper = Stepper(passes, optimizer, settings=config.optimizer, num_steps=num_steps)

    def microbatches(step: int) -> Iterator[Batch]:
        yield walk(2 * step, 31)
        yield walk(2 * step + 1, 31)

    return [stepper.step(step, microbatches(step)).loss for step in range(num_steps)]
