"""What a save in the background writes is the state at its moment, though steps go on."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shoal.checkpoint import OnFailure, load, steps
from shoal.errors import WorkError
from tests.checkpoint.saving import training
from tests.ranks import RankPool
from tests.short_disk import file_size_limit


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


def _save_without_memory(folder: Path, policy: OnFailure) -> tuple[str, list[bool]]:
    """The second rank gets none; what this rank is told, and what is tried again."""
    message = "saved"
    with training(folder, on_failure=policy) as trainer:
        with ExitStack() as stack:
            if dist.get_rank() == 1:  # whose writer has no such limit: it was there before
                stack.enter_context(file_size_limit(2000))
            trainer.save(1)
        try:
            trainer.saver.drain()
        except WorkError as error:
            message = str(error)
    return message, [is_tried_again for _, _, is_tried_again in trainer.errors()]


@pytest.mark.parametrize("policy", list(OnFailure))
def test_a_state_that_one_rank_has_no_memory_for_is_not_tried_again(
    ranks: RankPool, tmp_path: Path, policy: OnFailure
) -> None:
    """What was never copied aside would be written from whatever that memory holds."""
    (message, again), (same, _) = ranks.run(2, _save_without_memory, tmp_path, policy)
    assert message == same
    assert "Rank 1: " in message and "to stage a checkpoint could not be had" in message
    assert again == [False]
    assert steps(tmp_path) == ()


@pytest.mark.parametrize("policy", list(OnFailure))
def test_a_state_that_cannot_be_copied_is_never_published(
    tmp_path: Path, policy: OnFailure
) -> None:
    """A copy breaks off in the middle; what lies there already is of the save before."""
    with pytest.raises(WorkError, match="Rank 0: The state could not be copied aside"):
        with training(tmp_path, on_failure=policy) as trainer:
            trainer.save(1)
            trainer.saver.drain()
            layer = trainer.model.get_submodule("2")
            layer.bias = nn.Parameter(torch.empty(1, device="meta"))
            trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=1.0)
            trainer.save(2)
            trainer.saver.drain()
    assert [step.number for step in steps(tmp_path)] == [1]
