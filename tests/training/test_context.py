"""Sequences shared by ranks while layers are computed again in backward."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.parallel.matrix import Cell, train
from tests.ranks import RankPool


@pytest.mark.parametrize("exchange", ["gather", "ring"])
def test_recomputed_layers_give_the_same_bits(ranks: RankPool, exchange: str) -> None:
    cell = Cell(ranks=4, context=4, exchange=exchange, model="mixture", length=65, microbatches=3)
    kept = ranks.run(4, train, cell)
    again = ranks.run(4, train, replace(cell, recompute="layer"))
    for one, other in zip(kept, again, strict=True):
        assert [step.loss for step in one.steps] == [step.loss for step in other.steps]
        for rows, others in zip(one.held, other.held, strict=True):
            assert torch.equal(rows.change, others.change), rows.name
