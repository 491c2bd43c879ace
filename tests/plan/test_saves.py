"""What a plan tells of checkpoints against the files and the memory of real saves."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shoal.checkpoint import BackgroundSaver, State, capture_rng
from shoal.checkpoint.shard import pack
from shoal.config import Config
from shoal.plan import make_plan
from shoal.training import Stepper, build_model, build_sharded_optimizer, fill_model
from tests.parallel.matrix import MODELS
from tests.plan.configs import DENSE, EXPERTS, config
from tests.plan.measured import batches_of
from tests.ranks import RankPool

DIVIDED = {**DENSE, "vocab_size": 2**14}
"""Its table takes more than 4 MiB, so that replicas divide its rows."""
O, P = "optimizer", "parameters"  # noqa: E741
CELLS: dict[str, tuple[int, dict[str, Any], dict[str, dict[str, Any]]]] = {
    "alone, SGD": (1, DENSE, {"optimizer": {"kind": "sgd"}}),
    "replicas": (2, DIVIDED, {}),
    "ZeRO-1 in bf16": (
        2,
        EXPERTS,
        {
            "sharding": {"dense": {"inner": O}},
            "precision": {"main_weights": "bf16", "moments": "bf16"},
        },
    ),
    "parameters, 8 bits": (
        2,
        EXPERTS,
        {"sharding": {"expert": {"inner": P}}, "precision": {"moments": "8bit"}},
    ),
    "stages, SGD with momentum": (
        2,
        DENSE,
        {"parallel": {"pipeline": 2}, "optimizer": {"kind": "sgd", "momentum": 0.9}},
    ),
    "HSDP, Muon": (4, DENSE, {"cluster": {"nvlink_domain": 2}, "optimizer": {"kind": "muon"}}),
    "shared experts with biases, Muon in 8 bits": (
        4,
        MODELS["biased"],
        {
            "cluster": {"nvlink_domain": 2},
            "parallel": {"expert": 2},
            "optimizer": {"kind": "muon"},
            "precision": {"moments": "8bit"},
        },
    ),
}
COUNTERS = {"step": 1}


def _settings(name: str) -> Config:
    workers, model, sections = CELLS[name]
    base: dict[str, dict[str, Any]] = {
        "model": {"config": model},
        "cluster": {"workers": workers},
    }
    for section, values in sections.items():
        base[section] = {**base.get(section, {}), **values}
    return config(**base)


def _save_twice(settings: Config, folder: Path) -> list[int]:
    """Sizes of this rank's memory for saves, while it has saved a step in each."""
    plan = make_plan(settings)
    passes = build_model(settings, plan.precision, torch.device("cpu"))
    fill_model(passes.model, settings)
    optimizer = build_sharded_optimizer(settings, passes.model, plan.precision)
    stepper = Stepper(passes, optimizer, settings=settings.optimizer, num_steps=1)
    stepper.step(0, batches_of(plan))
    group = dist.new_group(backend="gloo")
    with BackgroundSaver(folder, note=lambda _: None, patience_s=30, group=group) as saver:
        for step in (1, 2):
            state = State(
                model=passes.model, optimizer=optimizer, counters=COUNTERS, rng=capture_rng()
            )
            saver.save(step, state)
        saver.drain()
        return _memory_for_saves()


def _memory_for_saves() -> list[int]:
    """Sizes of the anonymous files of that name which this process holds."""
    sizes = {}  # by number, since a mapping holds its file once more
    for entry in os.scandir("/proc/self/fd"):
        try:
            if "memfd:shoal-checkpoint" in os.readlink(entry.path):
                status = os.stat(entry.path)
                sizes[status.st_ino] = status.st_size
        except FileNotFoundError:  # what listed them
            continue
    return list(sizes.values())


@pytest.mark.parametrize("name", CELLS)
def test_files_and_copies_are_as_large_as_planned(
    ranks: RankPool, tmp_path: Path, name: str
) -> None:
    settings = _settings(name)
    saves = make_plan(settings).saves
    assert saves is not None
    copies = ranks.run(settings.cluster.workers, _save_twice, settings, tmp_path)
    counters = len(pack(("counters",), COUNTERS).data)
    for rank, planned in enumerate(saves.file_bytes):
        expected = planned + counters * (rank == 0)
        assert (tmp_path / "step-00000002" / f"__{rank}_0.distcp").stat().st_size == expected
        assert copies[rank] == [expected] * saves.num_copies
        assert saves.copy_bytes([rank]) == 2 * planned
    assert saves.num_bytes == sum(saves.file_bytes)


def test_saves_that_wait_take_no_copies() -> None:
    saves = make_plan(config(checkpoint={"asynchronous": False})).saves
    assert saves is not None
    assert saves.copy_bytes([0]) == 0 < saves.num_bytes
