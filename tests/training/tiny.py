"""A tiny decoder over bytes, its data and its configuration, for tests of the loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.config import Config, config_from_tree
from shoal.data import Batch, load_tokenizer, prepare
from shoal.plan import resolve_precision
from shoal.training import StepMetrics, TrainJob, train

MODEL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 66,
    "intermediate_size": 130,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 22,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
MIXTURE: dict[str, Any] = {
    **MODEL,
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 30,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.1,
    "output_router_logits": True,
}
WHOLE_BLOCKS: dict[str, Any] = {
    **MIXTURE,
    "hidden_size": 64,
    "head_dim": 32,
    "num_attention_heads": 2,
    "moe_intermediate_size": 32,
}
"""All matrices of 32 by 32 blocks, so that they can travel in MXFP8."""


def write_text(path: Path, *, num_bytes: int = 3000, seed: int = 5) -> Path:
    """A file of random words, one line each."""
    draw = np.random.default_rng(seed)
    words = ["".join(map(chr, draw.integers(97, 123, draw.integers(1, 9)))) for _ in range(40)]
    text = " ".join(words[index] for index in draw.integers(0, len(words), num_bytes // 5))
    path.write_text(text)
    return path


def config_tree(folder: Path, **sections: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """A run in ``folder`` on ``folder/text.txt``; ``sections`` are laid over section by section."""
    tree: dict[str, dict[str, Any]] = {
        "run": {"name": "run", "dir": str(folder / "runs"), "seed": 7},
        "model": {"config": dict(MODEL)},
        "data": {
            "sources": [{"path": str(folder / "text.txt")}],
            "tokenizer": "bytes",
            "seq_len": 24,
        },
        "cluster": {"device": "cpu"},
        "precision": {"compute": "fp32"},
        "optimizer": {"lr": 0.01},
        "train": {"steps": 3, "global_batch": 4, "micro_batch": 1},
    }
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    return tree


def make_config(folder: Path, **sections: dict[str, Any]) -> Config:
    """The configuration of that tree."""
    return config_from_tree(config_tree(folder, **sections))


def make_job(config: Config) -> TrainJob:
    """The job that a driver would hand out."""
    folder = Path(config.run.dir) / config.run.name
    folder.mkdir(parents=True, exist_ok=True)
    data = prepare(config.data, load_tokenizer("bytes"), folder / "data")
    return TrainJob(
        config=config,
        given=config,
        data=data,
        precision=resolve_precision(config),
        device="cpu",
    )


class _Crash(Exception):
    """Scripted."""


def train_until(job: TrainJob, step: int) -> None:
    """Train and die on every rank right after ``step`` is made for the first time."""

    def crash(metrics: StepMetrics) -> None:
        if metrics.step == step:
            raise _Crash

    with pytest.raises(_Crash):
        train(job, crash)


def part_of(batch: Batch, start: int, stop: int) -> Batch:
    """Some of the sequences."""
    return Batch(
        tokens=batch.tokens[start:stop],
        labels=batch.labels[start:stop],
        positions=batch.positions[start:stop],
        documents=batch.documents[start:stop],
    )


def metrics_of(step: int, *, loss: float = 2.5, step_seconds: float = 0.5) -> StepMetrics:
    """What some step is reported with."""
    return StepMetrics(
        step=step,
        loss=loss,
        auxiliary_loss=None,
        grad_norm=1.0,
        lr=0.1,
        tokens=64,
        labels=60,
        tokens_per_second=128.0,
        step_seconds=step_seconds,
        memory_bytes=1000,
    )
