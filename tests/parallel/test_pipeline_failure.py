"""What every stage does where the loss of the last one is not finite."""

from __future__ import annotations

import torch

from shoal.errors import WorkError
from shoal.fsdp import sharded_parameters, sync_weights
from shoal.plan import resolve_precision
from shoal.training import Stepper, build_model, build_sharded_optimizer, fill_model
from tests.parallel.matrix import Cell, sequences
from tests.ranks import RankPool


def _spoiled(cell: Cell) -> str:
    """What a rank says when the last stage's norm makes the loss infinite."""
    settings = cell.settings
    precision = resolve_precision(settings)
    passes = build_model(settings, precision, torch.device("cpu"))
    fill_model(passes.model, settings)
    with torch.no_grad():
        for parameter in sharded_parameters(passes.model):
            if parameter.name == "model.norm.weight":
                parameter.local.fill_(torch.inf)
    sync_weights(passes.model)
    optimizer = build_sharded_optimizer(settings, passes.model, precision)
    stepper = Stepper(passes, optimizer, settings=settings.optimizer, num_steps=1, readers=2)
    try:
        stepper.step(0, [sequences(cell.model, cell.length, 1, 0)])
    except WorkError as error:
        return str(error)
    return "nothing"


def test_every_stage_refuses_a_loss_that_is_not_finite(ranks: RankPool) -> None:
    for message in ranks.run(2, _spoiled, Cell(ranks=2, pipeline=2, microbatches=1)):
        assert "Step 1: the loss is" in message
