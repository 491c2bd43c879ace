"""Checkpoints of earlier releases still load.

``format_2/step-00000002`` was written by ``save(folder, 2, ...)`` of format version 2 from what
``_known`` returns. It stays as it is; a later version adds a folder beside it.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from shoal.checkpoint import load, verify

COUNTERS = {"step": 2, "sampler": {"epoch": 0, "position": 14}}
RNG = {"cpu": torch.arange(16, dtype=torch.uint8)}


def _known() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer whose every value follows from its place."""
    model = nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 5))
    optimizer = torch.optim.AdamW(model.parameters())
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            values = torch.arange(parameter.numel(), dtype=torch.float32).reshape(parameter.shape)
            parameter.copy_(values + number)
            optimizer.state[parameter] = {
                "step": torch.tensor(2.0),
                "exp_avg": values / 10 + number,
                "exp_avg_sq": values / 100 + number,
            }
    return model, optimizer


def test_format_2_loads() -> None:
    path = Path(__file__).parent / "format_2" / "step-00000002"
    assert verify(path) == ()
    model = nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 5))
    optimizer = torch.optim.AdamW(model.parameters())
    loaded = load(path, model=model, optimizer=optimizer)
    assert loaded.step == 2 and loaded.counters == COUNTERS
    assert loaded.rng is not None and torch.equal(loaded.rng["cpu"], RNG["cpu"])
    expected, its_optimizer = _known()
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        for name, value in its_optimizer.state[theirs].items():
            assert torch.equal(optimizer.state[ours][name], value)
