"""A run whose checkpoints are in a store goes on from there, wherever its folder went."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from unittest import mock

import pytest

from shoal.checkpoint import Manifest, steps
from shoal.training import TrainJob, TrainResult, train
from tests.checkpoint.bucket import CREDENTIALS, serving
from tests.ranks import RankPool
from tests.training.tiny import make_config, make_job, write_text


def _train(job: TrainJob, dies_at: int | None = None) -> TrainResult | None:
    class Crash(Exception):
        pass

    def crash(step: int) -> None:
        if step == dies_at:
            raise Crash

    with mock.patch.dict(os.environ, CREDENTIALS):
        if dies_at is None:
            return train(job)
        with pytest.raises(Crash):
            train(job, lambda metrics: crash(metrics.step))
    return None


def test_a_run_goes_on_from_a_store(tmp_path: Path, ranks: RankPool) -> None:
    write_text(tmp_path / "text.txt")
    with serving() as bucket:

        def job_of(name: str) -> TrainJob:
            return make_job(
                make_config(
                    tmp_path,
                    run={"name": name, "dir": str(tmp_path / "runs"), "seed": 7},
                    cluster={"workers": 2, "device": "cpu"},
                    train={"steps": 4, "global_batch": 4},
                    checkpoint={"every": 2, "keep": 2, "storage": bucket.uri("runs")},
                )
            )

        whole = ranks.run(2, _train, job_of("straight"))[0]
        job = job_of("cut")
        ranks.run(2, _train, job, 3)
        shutil.rmtree(job.folder.path)
        resumed = ranks.run(2, _train, job_of("cut"))[0]
        assert resumed.step == whole.step == 4
        assert [step.number for step in steps(job.folder.checkpoints)] == [2, 4]
        assert Manifest.read(resumed.checkpoint) == Manifest.read(whole.checkpoint)
        assert {key.split("/")[1] for key in bucket.keys()} == {"straight", "cut"}
        assert not [key for key in bucket.keys() if ".save" in key]
    assert not (job.folder.path / "checkpoints").exists()
