"""``parallel.expert`` through Ray: a run of two workers, its checkpoint, its export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.checkpoint import export, newest
from shoal.models import Decoder, HFWeights, load_weights
from shoal.training import train
from shoal_actors.driver import Cluster
from shoal_actors.train import run
from tests.ranks import RankPool
from tests.training.tiny import MIXTURE, make_config, make_job, write_text

STEPS = 3


def _losses(folder: Path) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def test_workers_that_share_experts_train_what_one_does(
    tmp_path: Path, ranks: RankPool, ray_session: Cluster
) -> None:
    write_text(tmp_path / "text.txt")
    sections: dict[str, dict[str, Any]] = {
        "model": {"config": MIXTURE},
        "train": {"steps": STEPS, "global_batch": 4},
        "optimizer": {"kind": "sgd", "lr": 0.1},
    }
    alone = make_config(tmp_path, **sections, run={"name": "alone"})
    ranks.run(1, train, make_job(alone))
    shared = make_config(
        tmp_path,
        **sections,
        run={"name": "shared"},
        cluster={"workers": 2, "device": "cpu"},
        parallel={"expert": 2},
    )
    assert run(shared) == 0
    expected = _losses(tmp_path / "runs" / "alone")
    assert len(expected) == STEPS
    assert _losses(tmp_path / "runs" / "shared") == pytest.approx(expected, rel=1e-5)

    logits = []
    for name in ("alone", "shared"):
        last = newest(tmp_path / "runs" / name / "checkpoints")
        assert last is not None and last.number == STEPS
        export(last.path, tmp_path / name, dtype=torch.float32)
        weights = HFWeights(tmp_path / name)
        decoder = Decoder(weights.config, torch.float32)
        load_weights(decoder, weights)
        output = decoder(torch.arange(24).unsqueeze(0))
        assert output.logits is not None
        logits.append(output.logits.detach())
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-5, atol=1e-5)
