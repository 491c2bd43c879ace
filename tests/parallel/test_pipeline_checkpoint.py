"""Runs in stages that are saved, cut, resumed, and loaded into other numbers of stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint import CheckpointWeights, Location, Manifest, export, load, newest, save
from shoal.config import Config
from shoal.fsdp import sharded_parameters
from shoal.models import HFWeights, read_hf_config
from shoal.models.config import DecoderConfig
from shoal.plan import resolve_precision
from shoal.training import build_model, build_sharded_optimizer, train
from tests.ranks import RankPool
from tests.training.tiny import MIXTURE, make_config, make_job, write_text

State = dict[str, torch.Tensor]
LAYERS = 5


def _config(
    folder: Path, *, stages: int, virtual: int = 1, data: int = 1, **sections: Any
) -> Config:
    model = {**MIXTURE, "num_hidden_layers": LAYERS, "attention_dropout": 0.1}
    return make_config(
        folder,
        **{
            "model": {"config": model},
            "cluster": {"workers": stages * data, "device": "cpu"},
            "parallel": {"pipeline": stages, "virtual_stages": virtual},
            "optimizer": {"lr": 0.01, "clip": 1.0},
            **sections,
        },
    )


def _loaded(config: Config, path: Path) -> list[tuple[str, int, State]]:
    """Weights and moments of this rank's rows, after loading."""
    precision = resolve_precision(config)
    passes = build_model(config, precision, torch.device("cpu"))
    optimizer = build_sharded_optimizer(config, passes.model, precision)
    load(path, model=passes.model, optimizer=optimizer)
    return [
        (p.name, p.row_start, {"weight": p.local.detach().clone(), **optimizer.state[p.local]})
        for p in sharded_parameters(passes.model)
        if p.local.numel()
    ]


def _saved_again(config: Config, path: Path, folder: Path) -> None:
    precision = resolve_precision(config)
    passes = build_model(config, precision, torch.device("cpu"))
    optimizer = build_sharded_optimizer(config, passes.model, precision)
    loaded = load(path, model=passes.model, optimizer=optimizer)
    save(folder, loaded.step, model=passes.model, optimizer=optimizer, counters=loaded.counters)


def _whole(path: Location, config: Config, ranks: RankPool) -> dict[str, State]:
    """Everything in a checkpoint, as one process without stages sees it."""
    return {name: state for name, _, state in ranks.run(1, _loaded, config, path)[0]}


def test_any_number_of_stages_reads_what_any_other_wrote(tmp_path: Path, ranks: RankPool) -> None:
    write_text(tmp_path / "text.txt")
    two = _config(tmp_path, stages=2, data=2, train={"steps": 2, "global_batch": 6})
    ranks.run(4, train, make_job(two))
    last = newest(tmp_path / "runs" / "run" / "checkpoints")
    assert last is not None and last.number == 2
    alone = _config(tmp_path, stages=1)
    expected = _whole(last.path, alone, ranks)
    assert set(expected["model.layers.4.mlp.gate.weight"]) == {
        "weight",
        "exp_avg",
        "exp_avg_sq",
        "step",
    }
    others = {
        2: [_config(tmp_path, stages=2, virtual=2)],
        4: [_config(tmp_path, stages=4), _config(tmp_path, stages=2, virtual=2, data=2)],
    }
    for workers, configs in others.items():
        for number, config in enumerate(configs):
            for held in ranks.run(workers, _loaded, config, last.path):
                for name, row_start, state in held:
                    for key, value in state.items():
                        whole = expected[name][key]
                        rows = whole[row_start : row_start + len(value)] if value.ndim else whole
                        assert torch.equal(value, rows), (name, key)
            again = tmp_path / f"again-{workers}-{number}"
            ranks.run(workers, _saved_again, config, last.path, again)
            found = _whole(again / last.path.name, alone, ranks)
            for name, state in expected.items():
                for key, value in state.items():
                    assert torch.equal(found[name][key], value), (name, key)
    _check_export(last.path, tmp_path / "hf")


def _check_export(path: Location, out: Path) -> None:
    export(path, out, dtype=torch.float32)
    written = HFWeights(out, DecoderConfig.from_hf(read_hf_config(out)))
    kept = CheckpointWeights(path)
    assert dict(written.shapes()) == dict(kept.shapes())
    for name, shape in kept.shapes().items():
        assert torch.equal(written.rows(name, 0, shape[0]), kept.rows(name, 0, shape[0])), name


def test_a_resumed_run_takes_the_same_steps(tmp_path: Path, ranks: RankPool) -> None:
    write_text(tmp_path / "text.txt")
    contents = []
    for name, legs in (("calm", [4]), ("cut", [2, 4])):
        for steps in legs:
            config = _config(
                tmp_path,
                stages=2,
                virtual=2,
                run={"name": name},
                train={"steps": steps, "global_batch": 3},
                checkpoint={"every": 2},
                optimizer={"lr": 0.01, "schedule": {"kind": "constant"}},
            )
            results = ranks.run(2, train, make_job(config))
            assert [result.step for result in results] == [steps, steps]
        last = newest(tmp_path / "runs" / name / "checkpoints")
        assert last is not None
        files = Manifest.read(last.path).files
        contents.append({file: str(record) for file, record in files.items()})
    assert contents[0] == contents[1]
