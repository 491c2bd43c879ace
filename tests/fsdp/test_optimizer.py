"""Torch's optimizers over sharded parameters, where some ranks hold no row of some."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from shoal.errors import ConfigError, WorkError
from shoal.fsdp import fully_shard_optimizer, sharded_parameters
from tests.fsdp.toys import (
    O,
    P,
    assert_same_weights,
    batch,
    build,
    loss_of,
    mesh_of,
    placements_on,
    shard,
    train,
    train_alone,
)
from tests.ranks import RankPool

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "fused adamw": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "fused": True}),
    "foreach adamw": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "foreach": True}),
    "sgd with momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "fused sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
}


def _train(name: str) -> tuple[int, int]:
    """Three steps against one process; parameters without a row here, and entries of the state."""
    kind, options = OPTIMIZERS[name]
    reference = build()
    alone = kind(reference.parameters(), **(options | {"fused": False}))
    expected = train_alone(reference, alone, steps=3, microbatches=1, ranks=4)
    rowless = entries = 0
    for shape, outer, inner in (((4,), P, P), ((2, 2), O, P)):
        mesh = mesh_of(shape)
        sharded = shard(build(), mesh, placements_on(mesh, outer, inner))
        optimizer = kind(sharded.model.parameters(), **options)
        losses = train(sharded, optimizer, steps=3, microbatches=1)
        assert losses == pytest.approx(expected, rel=1e-5)
        assert_same_weights(sharded.model, reference, 1e-4, 2e-5)
        for parameter in sharded_parameters(sharded.model):
            state = optimizer.state[parameter.local]
            shapes = {v.shape for v in state.values() if v is not None and v.dim()}
            assert shapes == {parameter.local.shape}
            if "step" in state:
                assert state["step"] == 3
            rowless += parameter.local.numel() == 0
            entries += 1
        restored = kind(sharded.model.parameters(), **options)
        restored.load_state_dict(optimizer.state_dict())
        assert restored.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()
        assert all(len(group["params"]) == 12 for group in optimizer.param_groups)
    return rowless, entries


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_optimizers_step_like_in_one_process(ranks: RankPool, name: str) -> None:
    found = ranks.run(4, _train, name)
    assert any(rowless for rowless, _ in found)
    assert {entries for _, entries in found} == {24}


def _refusals() -> None:
    model, mesh, rank = build(), mesh_of((2,)), dist.get_rank()
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    sharded = shard(model, mesh, placements_on(mesh, O, O))
    with pytest.raises(ConfigError, match="before the model was sharded"):
        fully_shard_optimizer(early)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fully_shard_optimizer(optimizer)
    sharded.context.is_last = False
    loss_of(model, batch(0, 0, rank)).backward()
    with pytest.raises(WorkError, match="last microbatch"):
        optimizer.step()
    sharded.context.is_last = True
    loss_of(model, batch(0, 1, rank)).backward()
    optimizer.step()


def test_steps_that_would_lose_gradients_are_refused(ranks: RankPool) -> None:
    ranks.run(2, _refusals)
