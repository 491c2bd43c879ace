"""Whole runs of the loop: resumption bit for bit, the end of the data, other numbers of ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shoal.checkpoint import Manifest, export
from shoal.config import load_config
from shoal.training import EventReader, StepMetrics, TrainJob, TrainResult, train
from tests.ranks import RankFailure, RankPool
from tests.training.tiny import (
    MIXTURE,
    MODEL,
    WHOLE_BLOCKS,
    make_config,
    make_job,
    train_until,
    write_text,
)


def _losses(job: TrainJob) -> list[tuple[int, float, float]]:
    lines = (job.folder.path / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [(record["step"], record["loss"], record["lr"]) for record in records]


def _files(result: TrainResult) -> dict[str, str]:
    """Checksums of a run's last checkpoint: weights, moments, counters and generators."""
    assert result.checkpoint is not None
    return {name: str(record) for name, record in Manifest.read(result.checkpoint).files.items()}


def _job(folder: Path, name: str, *, steps: int, **sections: dict[str, Any]) -> TrainJob:
    sections.setdefault("train", {})
    sections["train"] = {"steps": steps, "global_batch": 4, **sections["train"]}
    sections["run"] = {"name": name, "dir": str(folder / "runs"), "seed": 7}
    return make_job(make_config(folder, **sections))


CASES: dict[str, dict[str, Any]] = {
    "fp32, one rank": {"cluster": {"workers": 1, "device": "cpu"}},
    "bf16, two ranks, HFSDP": {
        "cluster": {"workers": 2, "device": "cpu", "nvlink_domain": 1},
        "precision": {"compute": "bf16", "moments": "bf16"},
        "sharding": {"dense": {"outer": "optimizer", "inner": "parameters"}},
    },
    "shared sequences, two ranks": {
        "cluster": {"workers": 2, "device": "cpu"},
        "parallel": {"context": 2, "context_exchange": "ring"},
        "data": {"seq_len": 25},
        "model": {"config": MIXTURE},
        "train": {"micro_batch": 2},
    },
    "mixture, two ranks, ZeRO-3": {
        "cluster": {"workers": 2, "device": "cpu"},
        "model": {"config": {**MIXTURE, "attention_dropout": 0.1}},
        "train": {"recompute": "layer", "micro_batch": 2},
        "optimizer": {"kind": "muon", "lr": 0.01, "weight_decay": 0.1, "clip": 1.0},
        "precision": {"compute": "fp32", "moments": "8bit"},
    },
    "mixture, two ranks that share experts": {
        "cluster": {"workers": 2, "device": "cpu"},
        "parallel": {"expert": 2},
        "model": {"config": {**MIXTURE, "attention_dropout": 0.1}},
        "sharding": {"dense": {"inner": "optimizer"}},
        "precision": {"compute": "fp32", "main_weights": "bf16", "rounding": "stochastic"},
    },
    "MXFP8, two ranks that share experts, recomputed": {
        "cluster": {"workers": 2, "device": "cpu"},
        "parallel": {"expert": 2},
        "model": {"config": WHOLE_BLOCKS},
        "train": {"recompute": "layer", "micro_batch": 2},
        "precision": {"compute": "mxfp8", "main_weights": "bf16", "keep_bf16": ["*.0.self_attn"]},
    },
}


def _train_until_told(job: TrainJob, step: int) -> TrainResult:
    """Train with one rank, not the first, told to end once ``step`` is made."""
    told: list[bool] = []

    def tell(metrics: StepMetrics) -> None:
        if metrics.step == step and dist.get_rank() == 1:
            told.append(True)

    return train(job, tell, lambda: bool(told))


def test_a_run_that_is_told_to_end_goes_on_later(tmp_path: Path, ranks: RankPool) -> None:
    write_text(tmp_path / "text.txt")
    sections = CASES["shared sequences, two ranks"]  # where each is read by both
    straight = _job(tmp_path, "straight", steps=6, **sections)
    whole = ranks.run(2, train, straight)[0]
    job = _job(tmp_path, "cut", steps=6, **sections)
    cut = ranks.run(2, _train_until_told, job, 2)
    assert [(each.step, each.is_cut, each.is_out_of_data) for each in cut] == 2 * [(3, True, False)]
    assert cut[0].checkpoint is not None and cut[0].checkpoint.name == "step-00000003"
    # Told before its last step, a run has nothing left to go on with.
    last = ranks.run(2, _train_until_told, job, 5)
    assert [(each.step, each.is_cut) for each in last] == 2 * [(6, False)]
    assert _losses(job) == _losses(straight)
    assert _files(last[0]) == _files(whole)
    events = [(event["event"], event["step"]) for event in EventReader(job.folder.path).poll()]
    assert events == [("save", 3), ("resume", 3), ("save", 6), ("end", 6)]


@pytest.mark.parametrize("case", CASES)
def test_two_resumptions_are_as_none(tmp_path: Path, ranks: RankPool, case: str) -> None:
    write_text(tmp_path / "text.txt")
    sections: dict[str, Any] = {
        "model": {"config": {**MODEL, "attention_dropout": 0.1}},
        "optimizer": {
            "lr": 0.01,
            "weight_decay": 0.1,
            "clip": 1.0,
            "schedule": {"kind": "cosine", "warmup_steps": 3},
        },
        "checkpoint": {"every": 4, "keep": 1},
        **CASES[case],
    }
    world_size = sections["cluster"]["workers"]
    straight = _job(tmp_path, "straight", steps=12, **sections)
    whole = ranks.run(world_size, train, straight)[0]
    job = _job(tmp_path, "resumed", steps=12, **sections)
    # The steps after the last checkpoint are lost and made again.
    ranks.run(world_size, train_until, job, 6)
    ranks.run(world_size, train_until, job, 9)
    resumed = ranks.run(world_size, train, job)[0]
    assert resumed.step == whole.step == 12
    assert _losses(job) == _losses(straight)
    assert _files(resumed) == _files(whole)
    events = [(event["event"], event["step"]) for event in EventReader(job.folder.path).poll()]
    assert events == [
        ("save", 4),
        ("resume", 4),
        ("save", 8),
        ("resume", 8),
        ("save", 12),
        ("end", 12),
    ]


def test_all_ranks_stop_together_when_the_data_ends(tmp_path: Path, ranks: RankPool) -> None:
    write_text(tmp_path / "text.txt", num_bytes=24 * 10)
    job = _job(
        tmp_path,
        "short",
        steps=50,
        cluster={"workers": 2, "device": "cpu"},
        data={"seq_len": 24, "epochs": 1},
    )
    results = ranks.run(2, train, job)
    steps = job.data.num_sequences // 4
    assert 0 < steps < 50
    assert [(result.step, result.is_out_of_data) for result in results] == [(steps, True)] * 2
    assert results[0].checkpoint is not None
    assert results[0].checkpoint.name == f"step-{steps:08}"
    again = ranks.run(2, train, job)
    assert [(result.step, result.is_out_of_data) for result in again] == [(steps, True)] * 2


def test_a_run_goes_on_at_another_number_of_ranks(tmp_path: Path, ranks: RankPool) -> None:
    write_text(tmp_path / "text.txt")
    one = _job(tmp_path, "one", steps=6, checkpoint={"every": 3})
    ranks.run(1, train, one)
    changing = _job(
        tmp_path,
        "changing",
        steps=6,
        checkpoint={"every": 3},
        cluster={"workers": 2, "device": "cpu"},
    )
    ranks.run(2, train_until, changing, 4)
    single = changing.config.cluster.model_copy(update={"workers": 1})
    ranks.run(
        1, train, replace(changing, config=changing.config.model_copy(update={"cluster": single}))
    )
    for (step, loss, _), (other_step, other, _) in zip(
        _losses(one), _losses(changing), strict=True
    ):
        assert step == other_step
        assert other == pytest.approx(loss, rel=1e-5)


def test_a_run_goes_on_where_weights_travel_otherwise(tmp_path: Path, ranks: RankPool) -> None:
    """Two ranks whose weights travel in MXFP8, then one in bf16: the very losses of two ranks."""
    write_text(tmp_path / "text.txt")
    sections: dict[str, Any] = {
        "model": {"config": WHOLE_BLOCKS},
        "cluster": {"workers": 2, "device": "cpu"},
        "precision": {"compute": "mxfp8"},
    }
    straight = _job(tmp_path, "straight", steps=4, **sections)
    ranks.run(2, train, straight)
    begun = _job(tmp_path, "changing", steps=2, **sections)
    ranks.run(2, train, begun)
    sections["cluster"] = {"workers": 1, "device": "cpu"}
    sections["precision"] = {"compute": "mxfp8", "parameter_gather": "bf16"}
    ranks.run(1, train, _job(tmp_path, "changing", steps=4, **sections))
    assert _losses(begun) == _losses(straight)


@pytest.mark.parametrize("exchange", ["gather", "ring"])
def test_a_run_goes_on_with_other_ranks_a_sequence(
    tmp_path: Path, ranks: RankPool, exchange: str
) -> None:
    """One rank, then two that share its sequences, then one again: the same losses."""
    write_text(tmp_path / "text.txt")
    data = {"seq_len": 25}
    one = _job(tmp_path, "one", steps=6, data=data)
    ranks.run(1, train, one)
    together: dict[str, Any] = {
        "cluster": {"workers": 2, "device": "cpu"},
        "parallel": {"context": 2, "context_exchange": exchange},
    }
    for steps, sections in ((2, {}), (4, together), (6, {})):
        job = _job(tmp_path, f"changing-{exchange}", steps=steps, data=data, **sections)
        ranks.run(2 if sections else 1, train, job)
    assert [step for step, _, _ in _losses(job)] == [1, 2, 3, 4, 5, 6]
    for (_, loss, _), (_, other, _) in zip(_losses(one), _losses(job), strict=True):
        assert other == pytest.approx(loss, rel=1e-5)


def test_a_rank_starts_from_the_checkpoint_of_another_run(tmp_path: Path, ranks: RankPool) -> None:
    write_text(tmp_path / "text.txt")
    first = _job(tmp_path, "first", steps=3)
    saved = ranks.run(1, train, first)[0].checkpoint
    second = _job(tmp_path, "second", steps=5, checkpoint={"resume": str(saved)})
    result = ranks.run(1, train, second)[0]
    assert result.step == 5
    assert [step for step, _, _ in _losses(second)] == [4, 5]
    assert result.checkpoint is not None and result.checkpoint.parent.parent.name == "second"


def test_a_run_on_fewer_workers_keeps_the_configuration_that_it_was_given(
    tmp_path: Path, ranks: RankPool
) -> None:
    """So the command that is given the run's folder goes on as the run did, and grows again."""
    write_text(tmp_path / "text.txt")
    cluster = {"workers": 4, "workers_min": 1, "device": "cpu"}
    job = _job(tmp_path, "small", steps=1, cluster=cluster, train={"global_batch": None})
    ranks.run(1, train, job.at_size(1))
    assert load_config(job.folder.path / "config.yaml") == job.config
    assert len(_losses(job)) == 1


def _train_and_touch(job: TrainJob, file: Path) -> TrainResult:
    return train(job, lambda metrics: file.unlink(missing_ok=True))


def test_what_lies_beside_the_weights_is_read_once(tmp_path: Path, ranks: RankPool) -> None:
    """Whoever tidies up or replaces a file of the model changes no checkpoint of the run."""
    write_text(tmp_path / "text.txt")
    first = ranks.run(1, train, _job(tmp_path, "first", steps=1))[0].checkpoint
    model = tmp_path / "model"
    export(first, model)
    template = model / "chat_template.jinja"
    template.write_text("{{ messages }}")
    sections: dict[str, Any] = {"model": {"path": str(model), "config": None}}
    sections |= {"cluster": {"workers": 2, "device": "cpu"}, "checkpoint": {"every": 1}}
    job = _job(tmp_path, "second", steps=3, **sections)
    saved = ranks.run(2, _train_and_touch, job, template)[0].checkpoint
    assert not template.exists()
    assert (saved / "attachments/hf/chat_template.jinja").read_text() == "{{ messages }}"


def test_a_folder_that_takes_no_configuration_is_named(tmp_path: Path, ranks: RankPool) -> None:
    write_text(tmp_path / "text.txt")
    job = _job(tmp_path, "blocked", steps=1)
    (job.folder.path / "config.yaml").mkdir()
    with pytest.raises(RankFailure, match="WorkError: cannot write .*config.yaml: Is a directory"):
        ranks.run(1, train, job)


def test_a_resume_with_another_model_is_refused_and_harms_nothing(
    tmp_path: Path, ranks: RankPool
) -> None:
    write_text(tmp_path / "text.txt")
    ranks.run(1, train, _job(tmp_path, "one", steps=2))
    folder = tmp_path / "runs" / "one"
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    other = {"config": {**MODEL, "intermediate_size": 131}}
    with pytest.raises(RankFailure, match="checkpoint.resume"):
        ranks.run(1, train, _job(tmp_path, "one", steps=4, model=other))
    assert {path: path.read_bytes() for path in before} == before


def test_a_loss_that_is_not_finite_stops_the_run_before_the_update(
    tmp_path: Path, ranks: RankPool
) -> None:
    write_text(tmp_path / "text.txt")
    job = _job(tmp_path, "burst", steps=9, optimizer={"kind": "sgd", "lr": 1e30})
    with pytest.raises(RankFailure, match=r"Step [23]: the (loss|gradient's norm) is (nan|inf)"):
        ranks.run(1, train, job)
