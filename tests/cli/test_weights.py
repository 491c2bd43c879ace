"""``shoal import``, ``shoal export`` and ``shoal checkpoint`` on a small model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.checkpoint import hf_attachments, save
from shoal.models import Decoder, DecoderConfig, HFWeights, initialize, write_hf_folder
from tests.cli.shell import shoal, shoal_here, write_config

MODEL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


def _decoder() -> Decoder:
    decoder = Decoder(DecoderConfig.from_hf(MODEL), torch.float32)
    initialize(decoder, seed=1)
    return decoder


def same_weights(folder: Path, decoder: Decoder) -> bool:
    """Whether a Hugging Face folder holds the weights of a decoder."""
    weights = HFWeights(folder)
    return all(
        torch.equal(weights.rows(name, 0, parameter.shape[0]), parameter)
        for name, parameter in decoder.named_parameters()
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run with two checkpoints."""
    decoder = _decoder()
    for step in (3, 6):
        save(
            tmp_path / "run" / "checkpoints",
            step,
            model=decoder,
            optimizer=None,
            counters={},
            attachments=hf_attachments(MODEL),
        )
    return tmp_path / "run"


def _damage(run: Path) -> Path:
    """Flip a bit in the last step's largest file."""
    step = run / "checkpoints" / "step-00000006"
    largest = max((p for p in step.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    return largest


def test_a_folder_is_imported(tmp_path: Path) -> None:
    decoder = _decoder()
    write_hf_folder(
        tmp_path / "source",
        decoder.config,
        ((n, p.detach()) for n, p in decoder.named_parameters()),
    )
    done = shoal("import", "source", "out", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "Wrote out\n"), done.stderr
    assert same_weights(tmp_path / "out", decoder)
    again = shoal_here("import", "source", "out", cwd=tmp_path)
    assert again.returncode == 2
    assert again.stderr.startswith("OUT = ")


def test_a_source_that_is_not_there(tmp_path: Path) -> None:
    done = shoal_here("import", "nowhere", "out", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("SOURCE = 'nowhere'")
    done = shoal_here("import", ".", "out", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("SOURCE = '.': this folder has neither a config.json nor")
    assert not (tmp_path / "out").exists()


def test_weights_go_to_megatron_and_come_back(tmp_path: Path, run: Path) -> None:
    there = shoal_here(
        "export", "run", "there", "--format", "megatron", "--dtype", "fp32", cwd=tmp_path
    )
    assert there.returncode == 0, there.stderr
    assert (tmp_path / "there" / "release" / "metadata.json").is_file()
    back = shoal_here("import", "there", "back", cwd=tmp_path)
    assert back.returncode == 0, back.stderr
    assert same_weights(tmp_path / "back", _decoder())


@pytest.mark.parametrize("checkpoint", ["run", "run/checkpoints/step-00000003"])
def test_a_checkpoint_is_exported(tmp_path: Path, run: Path, checkpoint: str) -> None:
    run_it = shoal if "step" in checkpoint else shoal_here
    done = run_it("export", checkpoint, "out", "--dtype", "fp32", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    step = "step-00000003" if "step" in checkpoint else "step-00000006"
    assert done.stdout == f"Wrote out from run/checkpoints/{step}\n"
    assert same_weights(tmp_path / "out", _decoder())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "llama"


def test_what_cannot_be_exported(tmp_path: Path, run: Path) -> None:
    done = shoal_here("export", "nowhere", "out", cwd=tmp_path)
    assert (done.returncode, done.stderr[:24]) == (2, "CHECKPOINT = 'nowhere': ")
    damaged = _damage(run)
    done = shoal_here("export", "run/checkpoints/step-00000006", "out", cwd=tmp_path)
    assert done.returncode == 1
    assert damaged.name in done.stderr
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    done = shoal_here("export", "empty", "out", cwd=tmp_path)
    assert done.returncode == 2
    assert "no complete checkpoint" in done.stderr
    assert not (tmp_path / "out").exists()


def test_steps_are_listed_and_verified(tmp_path: Path, run: Path) -> None:
    for path in ("run", "run/checkpoints"):
        done = shoal_here("checkpoint", "ls", path, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        first, second = done.stdout.splitlines()
        assert first.startswith("run/checkpoints/step-00000003  complete  ")
        assert second.endswith("bytes  saved by 1 rank")
    done = shoal_here("checkpoint", "verify", "run/checkpoints/step-00000003", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "run/checkpoints/step-00000003  whole\n")


def test_damage_is_found(tmp_path: Path, run: Path) -> None:
    damaged = _damage(run)
    done = shoal("checkpoint", "verify", "run", cwd=tmp_path)
    assert done.returncode == 1
    first, second = done.stdout.splitlines()
    assert first == "run/checkpoints/step-00000003  whole"
    assert damaged.name in second and "damaged" in second
    (run / "checkpoints" / "step-00000003" / "manifest.json").unlink()
    done = shoal_here("checkpoint", "ls", "run", cwd=tmp_path)
    assert done.returncode == 0
    assert "step-00000003  damaged: " in done.stdout


@pytest.mark.parametrize(
    ("path", "problem"), [("nowhere", "no such folder"), (".", "holds no checkpoints")]
)
def test_paths_without_checkpoints(tmp_path: Path, path: str, problem: str) -> None:
    for command in ("ls", "verify"):
        done = shoal_here("checkpoint", command, path, cwd=tmp_path)
        assert done.returncode == 2
        assert problem in done.stderr


def test_a_missing_step_names_those_there_are(tmp_path: Path, run: Path) -> None:
    done = shoal_here("checkpoint", "pin", "run/checkpoints/step-00000004", cwd=tmp_path)
    assert done.returncode == 2
    there = [f"run/checkpoints/step-0000000{number}" for number in (3, 6)]
    assert f"no such folder. Give one of {', '.join(there)}." in " ".join(done.stderr.split())


def test_a_step_is_rewritten_for_other_ranks(tmp_path: Path, run: Path) -> None:
    write_config(tmp_path, cluster="{workers: 3, device: cpu}")
    words = ("checkpoint", "reshard", "run", "other", "--config", "run.yaml")
    done = shoal_here(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    made = tmp_path / "other" / "checkpoints" / "step-00000006"
    assert done.stdout.startswith("Wrote other/checkpoints/step-00000006 for 3 ranks from run/")
    assert len(list(made.glob("*.distcp"))) == 3
    assert shoal_here("checkpoint", "verify", "other", cwd=tmp_path).returncode == 0
    shoal_here("export", "other", "model", "--dtype", "fp32", cwd=tmp_path)
    assert same_weights(tmp_path / "model", _decoder())
    done = shoal_here(
        *words[:4], "--set", "parallel.expert=2", "--config", "run.yaml", cwd=tmp_path
    )
    assert done.returncode == 2 and "parallel.expert" in done.stderr
