"""Training in MXFP8 beside bf16, and at every layout."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.config import Config
from shoal.data import Batch
from shoal.plan import resolve_precision
from shoal.training import Stepper, build_model, build_sharded_optimizer, fill_model
from tests.ranks import RankPool
from tests.training.tiny import MIXTURE, make_config

MODEL: dict[str, Any] = {
    **MIXTURE,
    "hidden_size": 64,
    "head_dim": 32,
    "num_attention_heads": 2,
    "moe_intermediate_size": 32,
    "num_experts": 4,
}


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


def _losses(config: Config, num_steps: int) -> list[float]:
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


def _compare(folder: Path, ranks: RankPool, num_steps: int) -> tuple[float, float, float]:
    """The first loss in bf16, and the mean of the last ten in bf16 and in MXFP8."""
    found = []
    for compute in ("bf16", "mxfp8"):
        config = make_config(
            folder,
            model={"config": MODEL},
            precision={"compute": compute},
            optimizer={"lr": 3e-3, "clip": 1.0},
            train={"steps": num_steps},
        )
        (losses,) = ranks.run(1, _losses, config, num_steps)
        found.append(losses)
    bf16, mxfp8 = found
    return bf16[0], sum(bf16[-10:]) / 10, sum(mxfp8[-10:]) / 10


def test_a_mixture_learns_as_in_bf16(tmp_path: Path, ranks: RankPool) -> None:
    first, bf16, mxfp8 = _compare(tmp_path, ranks, 50)
    assert bf16 < 0.8 * first
    assert mxfp8 == pytest.approx(bf16, rel=0.01)
    assert mxfp8 != bf16


@pytest.mark.full
def test_a_mixture_learns_as_in_bf16_for_200_steps(tmp_path: Path, ranks: RankPool) -> None:
    first, bf16, mxfp8 = _compare(tmp_path, ranks, 200)
    assert bf16 < 0.4 * first
    assert mxfp8 == pytest.approx(bf16, rel=0.01)
