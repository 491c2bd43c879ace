"""A plain model in this process alone, with some steps behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.checkpoint import Location, Saved, save


def model_of(seed: int, hidden: int = 6) -> nn.Sequential:
    """Two layers and an embedding of odd sizes."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(11, hidden), nn.Linear(hidden, 5), nn.Linear(5, 1))


def trained(
    model: nn.Module,
    *,
    num_steps: int,
    kind: type[torch.optim.Optimizer] = torch.optim.AdamW,
    **options: Any,
) -> torch.optim.Optimizer:
    """The model's optimizer after some steps."""
    optimizer = kind(model.parameters(), **{"lr": 0.1, **options})
    for _ in range(num_steps):
        model(torch.arange(7)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def save_plain(folder: Location, step: int, model: nn.Module) -> Saved:
    """Save a model after ``step`` steps."""
    optimizer = trained(model, num_steps=step)
    return save(folder, step, model=model, optimizer=optimizer, counters={"step": step})


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Weights and moments by name."""
    state = {name: value.detach().clone() for name, value in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            state[f"{name}.{key}"] = value.clone()
    return state


def local(location: Location) -> Path:
    """A location that is known to be on the disk."""
    assert isinstance(location, Path)
    return location
