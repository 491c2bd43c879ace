"""A run that goes on from a checkpoint is the run that was never interrupted, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shoal.checkpoint import capture_rng, load, restore_rng, save
from shoal.training import AdamW, Moments
from tests.checkpoint import toy
from tests.ranks import RankPool

NUM_STEPS, EVERY = 12, 4
NARROW = {
    "betas": (0.9, 0.95),
    "eps": 1e-8,
    "weight_decay": 0.1,
    "moments": Moments(torch.bfloat16),
}


def _train(
    folder: Path | None, layout: toy.Layout, first: int, last: int, options: dict[str, Any]
) -> tuple[list[float], Any, torch.Tensor]:
    """Steps ``first`` to ``last``, the first from a checkpoint; the losses and the end."""
    run = toy.build(layout, seed=1 + first, **options)
    torch.manual_seed(100 + dist.get_rank())
    if first:
        assert folder is not None
        path = folder / f"step-{first:08d}"
        loaded = load(path, model=run.model, optimizer=run.optimizer)
        assert loaded.rng is not None
        restore_rng(loaded.rng)
    losses = [run.step(number) for number in range(first, last)]
    if folder is not None:
        save(
            folder,
            last,
            model=run.model,
            optimizer=run.optimizer,
            counters={"step": last},
            rng=capture_rng(),
        )
    return losses, toy.held_rows(run), torch.rand(3)


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        (toy.HFSDP, {"compute": torch.bfloat16}),
        (toy.HFSDP, {"optimizer": AdamW, **NARROW}),
        (toy.ZERO1_2, {"fused": True}),
        (toy.ZERO3_3, {"optimizer": torch.optim.SGD, "momentum": 0.9}),
    ],
    ids=["hfsdp-bf16", "hfsdp-narrow", "zero1-fused", "zero3-sgd"],
)
def test_a_run_resumed_twice_equals_the_run_in_one_go(
    ranks: RankPool, tmp_path: Path, layout: toy.Layout, options: dict[str, Any]
) -> None:
    size = layout[0] * layout[1]
    calm = ranks.run(size, _train, None, layout, 0, NUM_STEPS, options)
    parts = [
        ranks.run(size, _train, tmp_path, layout, first, first + EVERY, options)
        for first in range(0, NUM_STEPS, EVERY)
    ]
    for rank in range(size):
        losses = [loss for part in parts for loss in part[rank][0]]
        assert losses == calm[rank][0]
        assert torch.equal(parts[-1][rank][2], calm[rank][2]), "the generators"
    toy.assert_equal_states(
        toy.whole([held for _, held, _ in parts[-1]]), toy.whole([held for _, held, _ in calm])
    )
    draws = [draw for *_, draw in calm]
    assert not torch.equal(draws[0], draws[1]), "ranks differ, so that a shared state would show"
