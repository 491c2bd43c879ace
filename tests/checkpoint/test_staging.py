"""What a save in the background writes is the state at its moment, though steps go on."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from shoal.checkpoint import load
from tests.checkpoint.saving import training


def test_the_next_step_waits_for_the_copy(tmp_path: Path) -> None:
    """Of so many values that a step would otherwise change some before they are copied."""
    model = nn.Embedding(4096, 4096)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    wanted = model.weight.detach().clone()
    with training(tmp_path) as trainer:
        trainer.model, trainer.optimizer = model, optimizer
        model.weight.grad = torch.ones_like(model.weight)
        trainer.save(1)
        optimizer.step()
        assert torch.equal(model.weight, wanted - 1)
        trainer.saver.drain()
    load(tmp_path / "step-00000001", model=model, optimizer=optimizer)
    assert torch.equal(model.weight, wanted)
