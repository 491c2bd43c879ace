"""What each rank of a context group makes of its tokens, against a decoder that sees all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from shoal.data.sample import cut_sample
from shoal.errors import ConfigError
from shoal.fsdp import communicator_for
from shoal.models import Decoder, DecoderConfig, DecoderOutput, initialize
from shoal.parallel.context import ContextParallel, SequenceCut
from tests.models.tiny import TINY
from tests.ranks import RankPool

LENGTH, SEED = 33, 3
BORDERS = (0, 5, 17, 26)
"""Starts of documents; 17 is a border of chunks too, and 5 is one among four ranks."""


def sequence() -> dict[str, torch.Tensor]:
    """A sequence as data gives it; every token occurs once, so a wrong label shows."""
    tokens = np.random.default_rng(1).permutation(257)[: LENGTH + 1]
    sample = cut_sample(
        tokens,
        np.ones(LENGTH + 1, dtype=np.bool_),
        np.array(BORDERS[1:], dtype=np.int64),
        seq_len=LENGTH,
        padding=256,
    )
    names = ("tokens", "labels", "positions", "documents")
    return {name: torch.from_numpy(getattr(sample, name)).unsqueeze(0) for name in names}


def log_probabilities(hf: dict[str, Any], *, shared: bool) -> torch.Tensor:
    """Of each label of this rank's tokens, ``[1, tokens]``."""
    context = None
    if shared:
        world = dist.group.WORLD
        assert world is not None
        context = ContextParallel(communicator_for(world, torch.device("cpu")), "ring")
    decoder = Decoder(DecoderConfig.from_hf(hf), torch.float32, context=context)
    initialize(decoder, SEED)
    with torch.no_grad():
        output: DecoderOutput = decoder(**sequence(), each_label=True)
    assert output.log_probabilities is not None
    return output.log_probabilities


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["llama3", "qwen2"])
def test_every_label_stays_with_its_token(ranks: RankPool, name: str, size: int) -> None:
    expected = log_probabilities(TINY[name], shared=False)
    # No label crosses a border of documents, and all others count.
    assert (expected[0] == 0).nonzero().flatten().tolist() == [b - 1 for b in BORDERS[1:]]
    cut = SequenceCut(length=LENGTH, size=size)
    for rank, each in enumerate(ranks.run(size, _shared, TINY[name])):
        torch.testing.assert_close(each, cut.take(expected, rank), rtol=1e-5, atol=1e-5)


def _shared(hf: dict[str, Any]) -> torch.Tensor:
    return log_probabilities(hf, shared=True)


def _train_with_dropout(hf: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        log_probabilities({**hf, "attention_dropout": 0.1}, shared=True)
    return caught.value.field


def test_dropout_of_attention_weights_is_refused(ranks: RankPool) -> None:
    fields = ranks.run(2, _train_with_dropout, TINY["llama2"])
    assert fields == ["model.config.attention_dropout"] * 2
