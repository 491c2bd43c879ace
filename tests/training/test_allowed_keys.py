"""Keys that a checkpoint lacks, or has and nobody reads: refused, or allowed by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shoal.checkpoint import CheckpointWeights
from shoal.errors import ConfigError
from shoal.models import Decoder, DecoderConfig, initialize
from shoal.training import TrainJob, train
from tests.ranks import RankPool
from tests.training.tiny import MODEL, make_config, make_job, write_text

HEAD = ["model.lm_head.weight", "optimizer.lm_head.*"]
UNTIED = {**MODEL, "tie_word_embeddings": False}
RATE = 1e-9
"""So small that a step leaves weights next to where they were."""


def _refusal(job: TrainJob) -> str:
    with pytest.raises(ConfigError) as caught:
        train(job)
    return str(caught.value)


def _job(folder: Path, name: str, steps: int, *, tied: bool, **checkpoint: object) -> TrainJob:
    return make_job(
        make_config(
            folder,
            run={"name": name, "dir": str(folder / "runs"), "seed": 7},
            model={"config": MODEL if tied else UNTIED},
            cluster={"workers": 2, "device": "cpu"},
            optimizer={"lr": RATE},
            train={"steps": steps, "global_batch": 4},
            checkpoint=checkpoint,
        )
    )


@pytest.mark.parametrize("tied", [True, False], ids=["missing", "unread"])
def test_only_keys_allowed_by_name_may_differ(tmp_path: Path, ranks: RankPool, tied: bool) -> None:
    write_text(tmp_path / "text.txt")
    path = ranks.run(2, train, _job(tmp_path, "first", 1, tied=tied))[0].checkpoint
    assert path is not None
    start = {"resume": str(path)}
    for allow in ([], HEAD[:1], ["*lm_heads*"]):
        job = _job(tmp_path, "refused", 2, tied=not tied, **start, allow=allow)
        for refusal in ranks.run(2, _refusal, job):
            assert "lm_head.weight" in refusal and "checkpoint.allow" in refusal
    job = _job(tmp_path, "second", 2, tied=not tied, **start, allow=HEAD)
    made = ranks.run(2, train, job)[0].checkpoint
    assert made is not None and made.name == "step-00000002"
    before, after = CheckpointWeights(path), CheckpointWeights(made)
    name = "model.layers.1.mlp.up_proj.weight"
    torch.testing.assert_close(
        after.rows(name, 0, 130), before.rows(name, 0, 130), rtol=0, atol=1e-6
    )
    if tied:
        fresh = Decoder(DecoderConfig.from_hf(UNTIED), torch.float32)
        initialize(fresh, 7)
        assert fresh.lm_head is not None
        head = after.rows("lm_head.weight", 0, 257)
        torch.testing.assert_close(head, fresh.lm_head.weight.detach(), rtol=0, atol=1e-6)
    else:
        assert "lm_head.weight" not in after.shapes()
