"""Collectives of a step, the order of units, and that they come to rest (A5, A6)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from shoal.config import Level
from shoal.fsdp import fully_shard, fully_shard_context
from shoal.fsdp.unit import Phase
from tests.fsdp.toys import (
    G,
    O,
    P,
    R,
    Tower,
    assert_same_weights,
    at_rest,
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

UNITS = 3  # two blocks and the root, one group each
MICROBATCHES = 2


def _collectives(shape: tuple[int, ...], outer: Level, inner: Level) -> Counter[tuple[str, str]]:
    """Collectives of one step after the first, by kind and axis (or by kind on a 1-D mesh)."""
    mesh = mesh_of(shape)
    sharded = shard(build(), mesh, placements_on(mesh, outer, inner))
    optimizer = torch.optim.SGD(sharded.model.parameters(), lr=0.1)
    train(sharded, optimizer, steps=1, microbatches=MICROBATCHES)
    sharded.ledger.clear()
    optimizer.zero_grad()
    for index in range(MICROBATCHES):
        sharded.context.is_last = index == MICROBATCHES - 1
        loss_of(sharded.model, batch(0, index, dist.get_rank())).backward()
    optimizer.step()
    inner_ranks = tuple(dist.get_process_group_ranks(mesh.get_group(mesh.ndim - 1)))
    return Counter(
        (c.operation, "inner" if c.ranks == inner_ranks else "outer")
        for c in sharded.ledger.collectives
    )


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        (R, {"all_reduce": UNITS}),
        (O, {"all_gather": UNITS, "reduce_scatter": UNITS}),
        (G, {"all_gather": UNITS, "reduce_scatter": MICROBATCHES * UNITS}),
        (
            P,
            {
                "all_gather": 2 * MICROBATCHES * UNITS,
                "reduce_scatter": MICROBATCHES * UNITS,
            },
        ),
    ],
)
def test_collectives_of_one_axis(ranks: RankPool, level: Level, expected: dict[str, int]) -> None:
    for counts in ranks.run(2, _collectives, (2,), level, level):
        assert counts == {(operation, "inner"): count for operation, count in expected.items()}


@pytest.mark.parametrize(
    ("outer", "inner", "expected"),
    [
        (
            R,
            P,
            {
                ("all_gather", "inner"): 2 * MICROBATCHES * UNITS,
                ("reduce_scatter", "inner"): MICROBATCHES * UNITS,
                ("all_reduce", "outer"): UNITS,
            },
        ),
        (
            O,
            P,
            {
                ("all_gather", "outer"): UNITS,
                ("all_gather", "inner"): 2 * MICROBATCHES * UNITS,
                ("reduce_scatter", "inner"): MICROBATCHES * UNITS,
                ("reduce_scatter", "outer"): UNITS,
            },
        ),
        (
            O,
            G,
            {
                ("all_gather", "outer"): UNITS,
                ("all_gather", "inner"): UNITS,
                ("reduce_scatter", "inner"): MICROBATCHES * UNITS,
                ("reduce_scatter", "outer"): UNITS,
            },
        ),
        (
            O,
            O,
            {
                ("all_gather", "outer"): UNITS,
                ("all_gather", "inner"): UNITS,
                ("reduce_scatter", "inner"): UNITS,
                ("reduce_scatter", "outer"): UNITS,
            },
        ),
    ],
)
def test_collectives_of_two_axes(
    ranks: RankPool, outer: Level, inner: Level, expected: dict[tuple[str, str], int]
) -> None:
    for counts in ranks.run(4, _collectives, (2, 2), outer, inner):
        assert counts == expected


class Nested(nn.Module):
    """``root(left(inner), right)``; each unit has a size of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.left = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 6, bias=False))
        self.right = nn.Linear(6, 12, bias=False)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Rows of 12."""
        return torch.tanh(self.right(self.left(self.first(value))))


NUMELS = {"Nested": 16, "left": 32, "left.1": 48, "right": 72}


def _orders() -> tuple[list[str], ...]:
    mesh, placements = mesh_of((1,)), placements_on(mesh_of((1,)), P, P)
    root, first, second = Nested(), nn.Linear(2, 2), nn.Embedding(2, 2)
    with fully_shard_context("cpu") as nested:
        for module in (root.left[1], root.left, root.right, root):
            fully_shard(module, mesh, placements)
    with fully_shard_context("cpu") as siblings:
        fully_shard(first, mesh, placements)
        fully_shard(second, mesh, placements)
    contexts = (nested, siblings)
    return tuple(c.order(phase) for c in contexts for phase in (Phase.FORWARD, Phase.BACKWARD))


def test_orders_follow_the_module_tree(ranks: RankPool) -> None:
    [orders] = ranks.run(1, _orders)
    assert orders == (
        ["Nested", "left", "left.1", "right"],
        ["Nested", "right", "left", "left.1"],
        ["Linear", "Embedding"],
        ["Embedding", "Linear"],
    )


def _gathered() -> list[str]:
    """Units in the order in which a step gathers them."""
    root = Nested()
    mesh = mesh_of((2,))
    units = [root.left[1], root.left, root.right]
    sharded = shard(root, mesh, placements_on(mesh, P, P), units)
    sharded.ledger.clear()
    root(torch.ones(2, 4)).sum().backward()
    names = {4 * numel: name for name, numel in NUMELS.items()}
    return [names[c.nbytes] for c in sharded.ledger.collectives if c.operation == "all_gather"]


def test_units_are_gathered_one_ahead_in_order(ranks: RankPool) -> None:
    for gathered in ranks.run(2, _gathered):
        assert gathered[:4] == ["Nested", "left", "left.1", "right"]
        assert gathered[4:] == ["Nested", "right", "left", "left.1"]


class Recomputed(nn.Module):
    """A tower whose blocks are recomputed: each, both at once, or each inside its own forward."""

    def __init__(self, tower: Tower, style: str, use_reentrant: bool) -> None:
        super().__init__()
        self.tower = tower
        self._style = style
        self._use_reentrant = use_reentrant
        if style == "inside":
            for block in tower.blocks:
                block.forward = self._wrap(block.forward)

    def _wrap(self, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def wrapped(hidden: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = checkpoint(function, hidden, use_reentrant=self._use_reentrant)
            return out

        return wrapped

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits."""
        tower = self.tower
        first, second = tower.blocks
        hidden = tower.embedding(tokens)
        if self._style == "each":
            hidden = self._wrap(second)(self._wrap(first)(hidden))
        elif self._style == "both":
            hidden = self._wrap(lambda value: second(first(value)))(hidden)
        else:
            hidden = second(first(hidden))
        logits: torch.Tensor = tower.head(hidden)
        return logits


def _recompute(style: str, use_reentrant: bool) -> None:
    mesh = mesh_of((2,))
    model = Recomputed(build(), style, use_reentrant)
    sharded = shard(
        model,
        mesh,
        placements_on(mesh, P, P),
        model.tower.blocks,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    train(sharded, optimizer, steps=1, microbatches=MICROBATCHES)
    assert at_rest(model)
    assert sharded.ledger.count("all_gather") == 2 * MICROBATCHES * UNITS
    assert sharded.ledger.count("reduce_scatter") == MICROBATCHES * UNITS
    train(sharded, optimizer, steps=1, microbatches=MICROBATCHES)
    assert at_rest(model)

    reference = build()
    alone = torch.optim.SGD(reference.parameters(), lr=0.5)
    for _ in range(2):
        train_alone(reference, alone, steps=1, microbatches=MICROBATCHES, ranks=2)
    assert_same_weights(model, reference, 1e-5, 1e-6, prefix="tower.")


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("style", ["each", "both", "inside"])
def test_recomputation_leaves_everythingat_rest(
    ranks: RankPool, style: str, use_reentrant: bool
) -> None:
    ranks.run(2, _recompute, style, use_reentrant)
