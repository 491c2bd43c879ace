"""``shoal plan`` of files that have a section ``serve``."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.shell import shoal, shoal_here, write_config
from tests.inference.small_models import random_folder
from tests.models.tiny import TINY


def _write(folder: Path, *lines: str) -> Path:
    random_folder(TINY["smollm2"], folder / "model")
    path = folder / "serve.yaml"
    path.write_text("\n".join(["model: {path: model}", *lines]), encoding="utf-8")
    return path


def test_tables_of_serving_alone(tmp_path: Path) -> None:
    config = _write(tmp_path, "serve: {replicas: 2, precision: fp32, kv: {tokens: 640}}")
    done = shoal("plan", str(config), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    for words in (
        "Serving model",
        "2, CPU threads each: 1",
        "640 tokens, 10 blocks of 64",
        "Requests of the model's 64 tokens that fit at once: 10.",
        "Memory of a machine that runs them all",
        "4 x, at least",
    ):
        assert words in done.stdout
    assert "Mesh" not in done.stdout


def test_json_of_serving_alone_follows_overrides(tmp_path: Path) -> None:
    config = _write(tmp_path, "serve: {precision: bf16}")
    options = ("--set", "serve.kv.tokens=1280", "--json")
    done = shoal_here("plan", str(config), *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert made.keys() == {"serving"}
    engine = made["serving"]["engine"]
    assert (engine["kv_blocks"], engine["kv_tokens"]) == (20, 1280)
    assert engine["bytes"] == engine["weight_bytes"] + 1280 * engine["kv_token_bytes"]


def test_refusals_of_serving_alone(tmp_path: Path) -> None:
    config = _write(tmp_path, "serve: {batch: {tokens: 8}}")
    done = shoal_here("plan", str(config), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "serve.batch.tokens = 8: a step holds at least one token of each of 32 sequences. "
        "Give at least 32, or lower serve.batch.sequences.\n"
    )
    for option in (
        ("--search",),
        ("--measure",),
        ("--gpu", "H100"),
        ("--gpu", "H100", "--gpus", "8"),
        ("--gpus", "8"),
        ("--svg", "plan.svg"),
        ("--memory", "0"),
        ("--top", "3"),
    ):
        done = shoal_here("plan", str(config), *option, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(f"{option[0]} = ") and "serving alone" in done.stderr


def test_a_file_that_names_a_model_alone_is_of_serving(tmp_path: Path) -> None:
    config = _write(tmp_path)
    done = shoal_here("plan", str(config), "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout).keys() == {"serving"}
    done = shoal_here("plan", str(config), "--set", "train.steps=1", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("data = None: is required")  # it has begun to describe a run
    config.write_text("model: {config: {model_type: llama}}")
    done = shoal_here("plan", str(config), cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("data = None: is required")


def test_serving_stands_below_training(tmp_path: Path) -> None:
    random_folder(TINY["smollm2"], tmp_path / "model")
    config = write_config(tmp_path, serve="{kv: {tokens: 640}}")
    model = ("--set", 'model={"path": "model"}')
    done = shoal_here("plan", str(config), *model, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.index("Collectives of a step") < done.stdout.index("Serving model")
    made = json.loads(shoal_here("plan", str(config), *model, "--json", cwd=tmp_path).stdout)
    assert made["serving"]["engine"]["kv_blocks"] == 10 and len(made["ranks"]) == 1


def test_a_model_without_weights_is_planned_for_training_alone(tmp_path: Path) -> None:
    config = write_config(tmp_path, serve="{replicas: 2}")
    done = shoal_here("plan", str(config), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Serving would be refused\n  model.config = '{…}': a model without" in done.stdout
    made = json.loads(shoal_here("plan", str(config), "--json", cwd=tmp_path).stdout)
    assert [problem["field"] for problem in made["serving"]["refused"]] == ["model.config"]
    config = write_config(tmp_path)
    done = shoal_here("plan", str(config), "--json", cwd=tmp_path)
    assert "serving" not in json.loads(done.stdout)
