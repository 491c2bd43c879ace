"""Steps that would spoil the weights: the run goes on as if their data were not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from shoal.checkpoint import Manifest, steps
from shoal.config import GuardSettings
from shoal.data import Sampler
from shoal.training import EventReader, Guard, SpoiledStep, StepMetrics, TrainJob, train
from tests.ranks import RankFailure, RankPool
from tests.training.tiny import MODEL, make_config, make_job, train_until

STEPS, BATCH_BYTES = 14, 4 * 24


def _job(folder: Path, name: str, action: str, *, limit: int = 3, **checkpoint: Any) -> TrainJob:
    """A run over "ababab...", whose tenth batch is noise."""
    draw = np.random.default_rng(3)
    plain = "ab" * (BATCH_BYTES // 2)
    noise = "".join(map(chr, draw.integers(33, 126, BATCH_BYTES)))
    (folder / "text.txt").write_text(9 * plain + noise + 20 * plain)
    return make_job(
        make_config(
            folder,
            run={"name": name, "dir": str(folder / "runs"), "seed": 7},
            model={"config": {**MODEL, "attention_dropout": 0.1}},
            data={"shuffle": False},
            cluster={"workers": 2, "device": "cpu"},
            checkpoint={"every": 4, "keep": 2, **checkpoint},
            train={
                "steps": STEPS,
                "guard": {"action": action, "spike_factor": 1.5, "window": 3, "limit": limit},
            },
        )
    )


def _train_on_the_rest(job: TrainJob, batches: set[int]) -> None:
    """Train on data of which some batches, by their numbers from 0, are never given out."""
    give = Sampler.__next__

    def give_others(sampler: Sampler) -> Any:
        while sampler.consumed // 4 in batches:
            give(sampler)
        return give(sampler)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sampler, "__next__", give_others)
        train(job)


def _steps(job: TrainJob) -> list[tuple[int, float]]:
    lines = (job.folder.path / "metrics.jsonl").read_text().splitlines()
    return [(record["step"], record["loss"]) for record in map(json.loads, lines)]


def _files(job: TrainJob) -> dict[str, str]:
    """Checksums of the last checkpoint: weights, moments, counters and generators."""
    manifest = Manifest.read(job.folder.path / "checkpoints" / f"step-{STEPS:08}")
    return {name: str(record) for name, record in manifest.files.items()}


def _refusals(job: TrainJob) -> list[dict[str, Any]]:
    events = EventReader(job.folder.path).poll()
    return [event for event in events if event["event"] == "spoiled"]


def test_going_back_is_as_if_the_data_were_not_there(tmp_path: Path, ranks: RankPool) -> None:
    job = _job(tmp_path, "run", "rollback")
    ranks.run(2, train, job)
    refusals = _refusals(job)
    first = refusals[0]
    assert (first["step"], first["goes_on_from"], first["num_skipped"]) == (10, 8, 2 * 4)
    assert first["cause"].startswith("the loss is ")
    assert {event["goes_on_from"] for event in refusals} == {8}
    skipped = max(event["num_skipped"] for event in refusals) // 4
    assert [step for step, _ in _steps(job)] == list(range(1, STEPS + 1))

    rest = _job(tmp_path, "rest", "rollback")
    ranks.run(2, _train_on_the_rest, rest, set(range(8, 8 + skipped)))
    assert _refusals(rest) == []
    assert _steps(job) == _steps(rest)
    assert _files(job) == _files(rest)

    # Cut before the spike, so that it comes again, and after it: the same bits.
    cut = _job(tmp_path, "cut", "rollback")
    ranks.run(2, train_until, cut, 9)
    ranks.run(2, train_until, cut, 13)
    ranks.run(2, train, cut)
    assert _steps(cut) == _steps(job)
    assert _files(cut) == _files(job)


def _train_and_lose_a_save(job: TrainJob) -> None:
    """Train; what step 8 is saved to is a file while that is done."""
    folder = job.folder.path / "checkpoints"
    kept = folder.with_name("kept")

    def interfere(metrics: StepMetrics) -> None:
        if metrics.step == 7 and dist.get_rank() == 0 and not kept.exists():
            folder.rename(kept)
            folder.write_text("in the way")
        if metrics.step == 9 and dist.get_rank() == 0 and folder.is_file():
            folder.unlink()
            kept.rename(folder)
            kept.write_text("once")

    train(job, interfere)


def test_a_lost_save_costs_a_longer_way_back_and_not_the_run(
    tmp_path: Path, ranks: RankPool
) -> None:
    job = _job(tmp_path, "run", "rollback", on_failure="warn", asynchronous=False)
    ranks.run(2, _train_and_lose_a_save, job)
    lost = [e["step"] for e in EventReader(job.folder.path).poll() if e["event"] == "save_failed"]
    assert lost == [8]
    first = _refusals(job)[0]
    assert (first["step"], first["goes_on_from"], first["num_skipped"]) == (10, 4, 6 * 4)
    assert [step for step, _ in _steps(job)] == list(range(1, STEPS + 1))
    assert [step.number for step in steps(job.folder.checkpoints)] == [12, 14]


def test_a_skipped_batch_changes_no_weight(tmp_path: Path, ranks: RankPool) -> None:
    job = _job(tmp_path, "run", "skip")
    ranks.run(2, train, job)
    refusals = _refusals(job)
    assert [(event["goes_on_from"], event["num_skipped"]) for event in refusals] == (
        [(9, 4)] * len(refusals)
    )
    assert [step for step, _ in _steps(job)] == list(range(1, STEPS + 1))
    losses = [loss for _, loss in _steps(job)]
    assert all(now <= 1.5 * sum(losses[i : i + 3]) / 3 for i, now in enumerate(losses[3:]))

    cut = _job(tmp_path, "cut", "skip")
    ranks.run(2, train_until, cut, 9)
    ranks.run(2, train, cut)
    assert _steps(cut) == _steps(job)
    assert _files(cut) == _files(job)


def test_the_first_checkpoint_to_go_back_to_is_the_start(tmp_path: Path, ranks: RankPool) -> None:
    """Where no data is good, the run ends after as many returns as it is granted."""
    write = make_config(
        tmp_path,
        optimizer={"kind": "sgd", "lr": 1e30},
        train={"steps": 9, "guard": {"action": "rollback", "limit": 2}},
    )
    (tmp_path / "text.txt").write_text("ab" * 3000)
    job = make_job(write)
    with pytest.raises(RankFailure, match=r"Step [23]: the (loss|gradient's norm) is (nan|inf)"):
        ranks.run(1, train, job)
    assert [event["goes_on_from"] for event in _refusals(job)] == [0, 0]
    assert (job.folder.path / "checkpoints" / "step-00000000").is_dir()


def test_a_spike_is_measured_against_a_full_window_of_accepted_losses() -> None:
    guard = Guard(GuardSettings(spike_factor=2.0, window=2))
    guard.take(1, 1.0)
    guard.take(2, 3.0)
    assert guard.most == 4.0
    with pytest.raises(SpoiledStep, match=r"Step 3: the loss is 4.1, more than 2 times the mean"):
        guard.take(3, 4.1)
    guard.take(3, 4.0)
    assert guard.losses == [3.0, 4.0]
