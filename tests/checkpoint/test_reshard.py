"""Checkpoints rewritten for another layout by one process: what the other's ranks would write."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from shoal.checkpoint import hf_attachments, load, reshard, save, verify
from shoal.checkpoint.metadata import METADATA_NAME
from shoal.config import Config
from shoal.errors import ConfigError, WorkError
from shoal.models import Decoder, DecoderConfig
from shoal.plan import buffers_of, held_by_rank, resolve_precision
from shoal.storage import MANIFEST_NAME
from shoal.training import build_model, build_sharded_optimizer, fill_model
from tests.checkpoint.matrix import MODEL, config_of, path_of, save_each
from tests.checkpoint.plain import local
from tests.checkpoint.saving import files_of
from tests.parallel.matrix import MODELS
from tests.ranks import RankPool
from tests.training.tiny import config_tree

TARGETS = ["alone", "ZeRO-3 on 3", "HSDP", "EP4", "PP2", "CP2 EP2 HFSDP"]


def _save_again(source: Path, folder: Path, config: Config) -> None:
    """Load, and save at this layout."""
    precision = resolve_precision(config)
    passes = build_model(config, precision, torch.device("cpu"))
    optimizer = build_sharded_optimizer(config, passes.model, precision)
    loaded = load(source, model=passes.model, optimizer=optimizer)
    save(
        folder,
        loaded.step,
        model=passes.model,
        optimizer=optimizer,
        counters=loaded.counters,
        rng=loaded.rng,
    )
    assert (loaded.rng is not None) == (config.cluster.workers == 4)


@pytest.fixture(scope="module")
def source(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of four ranks in two stages that share experts."""
    folder = tmp_path_factory.mktemp("source")
    ranks.run(4, save_each, folder, {"PP2 EP2": config_of(folder, "PP2 EP2", moments="8bit")})
    return path_of(folder, "PP2 EP2")


@pytest.mark.parametrize("target", TARGETS)
def test_the_files_are_those_of_the_other_ranks(
    ranks: RankPool, tmp_path: Path, source: Path, target: str
) -> None:
    _compare(ranks, tmp_path, source, config_of(tmp_path, target, moments="8bit"))


def _compare(ranks: RankPool, tmp_path: Path, source: Path, config: Config) -> None:
    """Rewrite a checkpoint for the ranks of ``config`` and have them save it themselves."""
    size = config.cluster.workers
    ranks.run(size, _save_again, source, tmp_path / "ranks", config)
    made = local(reshard(source, tmp_path / "offline", held_by_rank(config), buffers_of(config)))
    assert verify(made) == ()
    ours, theirs = files_of(made), files_of(tmp_path / "ranks" / made.name)
    # The same in other bytes: pickles tell equal objects from the same one.
    assert pickle.loads(ours.pop(METADATA_NAME)) == pickle.loads(theirs.pop(METADATA_NAME))
    manifest, other = (json.loads(files.pop(MANIFEST_NAME)) for files in (ours, theirs))
    for fields in (manifest, other):
        del fields["checksum"], fields["files"][METADATA_NAME]
    assert manifest == other
    assert len(ours) == size + 1 and ours == theirs
    assert [path.name for path in (tmp_path / "offline").iterdir()] == [made.name]


def _biased(config: Config) -> Config:
    """A model of which biases, which are no parameters, choose the experts."""
    model = {**MODELS["biased"], "num_hidden_layers": 5}
    return config.model_copy(update={"model": config.model.model_copy(update={"config": model})})


def _save_biases(folder: Path, config: Config) -> None:
    precision = resolve_precision(config)
    passes = build_model(config, precision, torch.device("cpu"))
    fill_model(passes.model, config)
    for number, bias in enumerate(passes.model.buffers()):
        bias.copy_(torch.arange(len(bias)) + number / 8)
    optimizer = build_sharded_optimizer(config, passes.model, precision)
    save(folder, 1, model=passes.model, optimizer=optimizer, counters={"step": 1})


@pytest.mark.parametrize("target", ["DP2", "PP2"])
def test_biases_that_choose_experts_go_along(ranks: RankPool, tmp_path: Path, target: str) -> None:
    ranks.run(1, _save_biases, tmp_path / "source", _biased(config_of(tmp_path, "alone")))
    source = tmp_path / "source" / "step-00000001"
    _compare(ranks, tmp_path, source, _biased(config_of(tmp_path, target)))


def test_what_cannot_be_is_refused(tmp_path: Path, source: Path) -> None:
    config = config_of(tmp_path, "alone")
    other = config.model_copy(
        update={
            "model": config.model.model_copy(update={"config": {**MODEL, "num_hidden_layers": 4}})
        }
    )
    with pytest.raises(ConfigError, match=r"model.layers.4.*differ"):
        reshard(source, tmp_path / "out", held_by_rank(other), buffers_of(other))
    assert not (tmp_path / "out").exists()
    made = local(reshard(source, tmp_path / "out", held_by_rank(config), buffers_of(config)))
    with pytest.raises(WorkError, match="complete checkpoint already"):
        reshard(source, tmp_path / "out", held_by_rank(config), buffers_of(config))
    shard = made / "__0_0.distcp"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    with pytest.raises(WorkError, match=r"__0_0.distcp.*damaged"):
        reshard(made, tmp_path / "again", held_by_rank(config), buffers_of(config))
    assert not (tmp_path / "again").exists()


def _peak_bytes(tmp_path: Path, vocabulary: int) -> int:
    """Most memory that the command takes for a model with so large a table."""
    hf: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": 512,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 8,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    }
    folder = tmp_path / str(vocabulary)
    save(
        folder / "run" / "checkpoints",
        3,
        model=Decoder(DecoderConfig.from_hf(hf), torch.float32),
        optimizer=None,
        counters={},
        attachments=hf_attachments(hf),
    )
    cluster = {"workers": 3, "device": "cpu"}
    tree = config_tree(folder, model={"config": hf}, cluster=cluster)
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    words = ["checkpoint", "reshard", "run", "other", "--config", "run.yaml"]
    process = subprocess.Popen([sys.executable, "-m", "shoal", *words], cwd=folder)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    assert len(list((folder / "other/checkpoints/step-00000003").glob("*.distcp"))) == 3
    return usage.ru_maxrss * 1024


@pytest.mark.full
def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    small, large = _peak_bytes(tmp_path, 50_000), _peak_bytes(tmp_path, 400_000)
    growth = 350_000 * 512 * 4
    assert large - small < 0.3 * growth
