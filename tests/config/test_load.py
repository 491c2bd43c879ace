"""Configuration files and overrides, from outside."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from shoal.config import Config, Level, config_from_tree, dump_config, load_config
from shoal.config.yaml_text import read_yaml, write_yaml
from shoal.errors import ConfigError, ConfigErrors

SMALL = """
model: {path: some/folder}
data:
  sources: [{path: corpus}]
train: {steps: 10}
"""


def _write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def _load(folder: Path, text: str, *overrides: str) -> Config:
    return load_config(_write(folder, text), overrides)


def _refused(folder: Path, text: str, *overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        _load(folder, text, *overrides)
    return caught.value


def test_ten_lines_train(tmp_path: Path) -> None:
    config = _load(tmp_path, SMALL)
    assert config.model.path == "some/folder"
    assert config.data.sources[0].path == "corpus"
    assert config.sharding.dense.outer is Level.REPLICATE
    assert config.optimizer.betas == (0.9, 0.95)


def test_the_dump_reads_back_equal(tmp_path: Path) -> None:
    config = _load(
        tmp_path,
        SMALL,
        "optimizer.eps=1e-12",
        "run.name='1e3'",
        "sharding.dense.inner=gradients",
        "optimizer.betas=[0.5, 0]",
        "model.overrides={rope_scaling: {factor: 8.0}, bos_token_id: null}",
    )
    again = _load(tmp_path, dump_config(config))
    assert again == config
    # Readers that follow YAML 1.1, such as a user's script, see the same values.
    assert config_from_tree(yaml.safe_load(dump_config(config))) == config


@pytest.mark.parametrize(
    "override",
    [
        "optimizer.schedule={kind: cosine, final: 0.1}",
        "parallel={context: 2, context_exchange: ring}",
        "train.guard={action: skip, limit: 1, spike_factor: 2.0, window: 5}",
        "cluster={workers: 2, workers_min: 1, grow_after_s: 9}",
        "cluster={workers_max: 2, grow_after_s: 9}",
        "data.sources=[{path: a, format: jsonl, text_key: body, messages_key: talk}]",
        "data.sources=[{path: a, format: text, include: [a], text_key: text}]",
    ],
)
def test_what_has_an_effect_passes(tmp_path: Path, override: str) -> None:
    config = _load(tmp_path, SMALL, override)
    assert _load(tmp_path, dump_config(config)) == config


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1E5", 100000.0),
        (".5", 0.5),
        ("3", 3.0),
        ("+2.", 2.0),
        ("0x10", 16.0),
    ],
)
def test_numbers_are_numbers(tmp_path: Path, text: str, value: float) -> None:
    from_file = _load(tmp_path, SMALL + f"optimizer: {{lr: {text}}}")
    from_command = _load(tmp_path, SMALL, f"optimizer.lr={text}")
    assert from_file.optimizer.lr == from_command.optimizer.lr == value


@pytest.mark.parametrize("text", ["on", "yes", "y", "1", '"true"'])
def test_only_true_and_false_are_truth_values(tmp_path: Path, text: str) -> None:
    problem = _refused(tmp_path, SMALL, f"data.shuffle={text}")
    assert problem.field == "data.shuffle"
    assert problem.remedy == "Write true or false"


def test_anchors_and_merges(tmp_path: Path) -> None:
    text = """
model: {path: x}
data:
  sources:
    - &first {path: a, weight: 2, format: text}
    - {<<: *first, path: b}
train: {steps: 1}
"""
    first, second = _load(tmp_path, text).data.sources
    assert (first.path, second.path) == ("a", "b")
    assert second.weight == 2.0 and second.format == "text"


def test_keys_are_text_as_written() -> None:
    assert read_yaml("1: a\non: b\nnull: c", "x") == {"1": "a", "on": "b", "null": "c"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the file is empty"),
        ("# nothing\n", "the file is empty"),
        ("- a\n- b\n", "the file holds no mapping"),
        ("just text", "the file holds no mapping"),
        (SMALL + "train: {steps: 2}", "line 6, column 1': is not valid YAML: the key 'train'"),
        ("run: {name: a, name: b}", "the key 'name' is written twice"),
        ("run:\n\tname: a", "Replace the tab by spaces"),
        ("run: [", "is not valid YAML"),
        ("run: *nobody", "undefined alias"),
        ("run: &a {name: *a}", "recursive"),
        ("a: 1\n---\nb: 2", "another document"),
        ("run: !!python/name:os.system x", "could not determine a constructor"),
        ("run: !!int many", "this is no number"),
        ("run: {name: \x00}", "Save it as plain UTF-8 text"),
        ("? [a, b]\n: 1", "a key must be plain text"),
    ],
)
def test_files_that_are_no_configuration(tmp_path: Path, text: str, words: str) -> None:
    assert words in str(_refused(tmp_path, text))


def test_paths_that_are_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        load_config(tmp_path / "missing.yaml", ())
    with pytest.raises(ConfigError, match="is a folder"):
        load_config(tmp_path, ())
    (tmp_path / "latin").write_bytes(b"run: {name: caf\xe9}")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        load_config(tmp_path / "latin", ())


@pytest.mark.parametrize(
    ("override", "field", "words"),
    [
        ("train.step=1", "train.step", "Did you mean train.steps"),
        ("optimiser.lr=1", "optimiser", "Did you mean optimizer"),
        ("train.lr=1", "train.lr", "Did you mean optimizer.lr"),
        ("data.sources.0.pth=x", "data.sources.0.pth", "Did you mean data.sources.0.path"),
        ("cluster.zzz=1", "cluster.zzz", "The keys of cluster are device, grow_after_s"),
        ("train.steps=0", "train.steps", "must be at least 1"),
        ("train.steps=many", "train.steps", "must be an integer"),
        ("train.steps=1e2", "train.steps", "Write 100"),
        ("train.steps=true", "train.steps", "must be an integer"),
        ("train.steps=1000000000001", "train.steps", "must be at most 1000000000000"),
        (f"train.global_batch={10**26}", "train.global_batch", "must be at most 16777216"),
        ("train.micro_batch=16777217", "train.micro_batch", "must be at most 16777216"),
        ("cluster.workers=1000000", "cluster.workers", "must be at most 65536"),
        (f"checkpoint.every={10**26}", "checkpoint.every", "must be at most 1000000000000"),
        ("run.name=7", "run.name", 'Put it in quotes: "7"'),
        ("run.name=../up", "run.name", "must be letters"),
        (f"run.name={'x' * 201}", "run.name", "200 at most"),
        ("run.dir=a\0b", "run.dir", "holds a NUL"),
        ("data.sources.0.path=a\udcff", "data.sources.0.path", "a character that UTF-8 lacks"),
        ("run.seed=9223372036854775808", "run.seed", "less than 9223372036854775808"),
        ("optimizer.lr=.nan", "optimizer.lr", "must be a finite number"),
        ("optimizer.lr=.inf", "optimizer.lr", "must be a finite number"),
        ("optimizer.kind=adam", "optimizer.kind", "did you mean adamw"),
        ("optimizer.betas=[0.9]", "optimizer.betas.1", "the list is too short"),
        ("optimizer.betas=[0.9, 0.9, 0.9]", "optimizer.betas", "more than 2"),
        ("optimizer.betas=[0.9, 1.0]", "optimizer.betas", "must lie in [0, 1)"),
        ("optimizer.betas=0.9", "optimizer.betas", "must be a list"),
        ("optimizer.momentum=0.9", "optimizer.momentum", "adamw takes no momentum"),
        ("optimizer={kind: sgd, betas: [0.9, 0.99]}", "optimizer.betas", "sgd has no such term"),
        ("optimizer={kind: sgd, eps: 1e-6}", "optimizer.eps", "sgd has no such term"),
        ("precision.keep_bf16=[a]", "precision.keep_bf16", "precision.compute to mxfp8"),
        ("precision.first_last_layers_bf16=true", "precision.first_last_layers_bf16", "multiply"),
        (
            "precision={compute: mxfp8, num_layers_at_end_in_bf16: 2}",
            "precision.num_layers_at_end_in_bf16",
            "precision.first_last_layers_bf16 to true",
        ),
        ("optimizer.schedule.warmup_steps=10", "optimizer.schedule.warmup_steps", "fewer than 10"),
        (
            "optimizer.schedule={kind: wsd, warmup_steps: 4, decay_steps: 7}",
            "optimizer.schedule.decay_steps",
            "only 6 steps remain",
        ),
        ("optimizer.schedule.decay_steps=1", "optimizer.schedule.decay_steps", "not decay"),
        ("optimizer.schedule.final=0.1", "optimizer.schedule.final", "schedule.kind to cosine"),
        ("parallel.context_exchange=ring", "parallel.context_exchange", "context to 2 or more"),
        ("train.guard.window=5", "train.guard.window", "or set train.guard.spike_factor"),
        ("train.guard.limit=1", "train.guard.limit", "train.guard.action to skip or rollback"),
        ("cluster.grow_after_s=9", "cluster.grow_after_s", "cluster.workers_min or"),
        (
            "data.sources=[{path: a, format: text, text_key: body}]",
            "data.sources.0.text_key",
            "what is read as text has no columns",
        ),
        (
            "data.sources=[{path: a, format: megatron, messages_key: talk}]",
            "data.sources.0.messages_key",
            "what is read as megatron has no columns",
        ),
        (
            'data.sources=[{path: a, format: megatron, include: ["*"]}]',
            "data.sources.0.include",
            "named by its prefix",
        ),
        ("sharding.dense.outer=full", "sharding.dense.outer", "Use one of replicate, optimizer"),
        ("model.config={}", "model.path", "model.config is given too"),
        ("model.path=null", "model.path", "no model is named"),
        ("cluster=3", "cluster", "must be a mapping"),
        ("data.sources=[]", "data.sources", "must not be empty"),
        ("data.sources.2.path=x", "--set", "index from 0 to 1"),
        ("train.steps.more=1", "--set train.steps.more", "Set train.steps itself"),
        ("train.steps", "--set", "is not key=value"),
        ("=1", "--set", "is not key=value"),
        ("train..steps=1", "--set", "is not key=value"),
        ("optimizer.betas=[0.9", "--set optimizer.betas", "is not valid YAML"),
        ("optimizer.betas=" + "[" * 5000, "--set optimizer.betas", "nested too deeply"),
    ],
)
def test_refused_values(tmp_path: Path, override: str, field: str, words: str) -> None:
    problem = _refused(tmp_path, SMALL, override)
    assert problem.field == field
    assert words in str(problem)
    assert problem.exit_code == 2


def test_required_keys(tmp_path: Path) -> None:
    problem = _refused(tmp_path, "run: {name: x}")
    assert isinstance(problem, ConfigErrors)
    assert [each.field for each in problem.problems] == ["model", "data", "train"]
    assert "Write it with train.steps" in str(problem)


def test_all_problems_come_in_one_message(tmp_path: Path) -> None:
    problem = _refused(tmp_path, SMALL, "train.steps=x", "zap=1", "optimizer.betas=[2, 0]")
    assert isinstance(problem, ConfigErrors)
    fields = {each.field for each in problem.problems}
    assert fields == {"train.steps", "zap", "optimizer.betas"}
    assert len(str(problem).splitlines()) == 3


def test_overrides_reach_lists_and_the_last_wins(tmp_path: Path) -> None:
    config = _load(
        tmp_path,
        SMALL,
        "data.sources.0.path=a",
        "data.sources.0.path=*.py",
        "data.sources.1.path=b # not a comment",
        "optimizer.clip=1",
        "optimizer.clip=null",
        "cluster.workers = 2",
    )
    assert [source.path for source in config.data.sources] == ["*.py", "b # not a comment"]
    assert config.optimizer.clip is None
    assert config.cluster.workers == 2


def test_overrides_alone_can_make_a_run(tmp_path: Path) -> None:
    config = _load(tmp_path, "run: {}", "model.path=x", "data.sources.0.path=a", "train.steps=1")
    assert config.train.steps == 1


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc", "Cn", "Co"))),
    lambda below: (
        st.lists(below, max_size=3)
        | st.dictionaries(st.text("abcdefon1.", min_size=1), below, max_size=3)
    ),
    max_leaves=8,
)


@given(PLAIN)
def test_written_yaml_reads_back(value: object) -> None:
    again = read_yaml(write_yaml(value), "x")
    assert again == value
    assert _kinds(again) == _kinds(value)


def _kinds(value: object) -> object:
    if isinstance(value, dict):
        return {key: _kinds(below) for key, below in value.items()}
    if isinstance(value, list):
        return [_kinds(below) for below in value]
    sign = math.copysign(1.0, value) if isinstance(value, float) else None
    return type(value), sign
