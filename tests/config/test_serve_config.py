"""What ``shoal serve`` reads: a folder, a file of its own, or the file of a training run."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.config import load_serve_config, serve_config_from_tree
from shoal.errors import ConfigError


def _file(folder: Path, text: str) -> Path:
    path = folder / "serve.yaml"
    path.write_text(text)
    return path


def test_a_folder_is_a_model_with_the_defaults(tmp_path: Path) -> None:
    config = load_serve_config(tmp_path, ["serve.replicas=3", "serve.limits.queue=7"])
    assert config.folder == tmp_path and config.served_name == tmp_path.name
    assert config.serve.replicas == config.serve.num_frontends == 3
    assert config.serve.limits.queue == 7


def test_a_folder_that_is_named_by_dots_has_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    assert load_serve_config(tmp_path / "below" / "..").served_name == tmp_path.name


def test_a_file_needs_nothing_of_training(tmp_path: Path) -> None:
    text = "model: {path: some/model}\nserve: {model_name: mine, frontends: 2}\n"
    config = load_serve_config(_file(tmp_path, text))
    assert config.folder == Path.cwd() / "some" / "model"
    assert config.served_name == "mine" and config.serve.num_frontends == 2


def test_the_file_of_a_training_run_is_checked_as_a_whole(tmp_path: Path) -> None:
    text = (
        "model: {path: m}\ndata: {sources: [{path: a.txt}]}\ntrain: {steps: 3}\nserve: {port: 0}\n"
    )
    assert load_serve_config(_file(tmp_path, text)).serve.port == 0
    with pytest.raises(ConfigError, match=r"train\.steps = 0"):
        load_serve_config(_file(tmp_path, text.replace("3", "0")))


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({}, r"^model\.path = None: no model is named\. Set it to a Hugging Face folder"),
        ({"serve": {}, "model": {}}, r"^model\.path = None: no model is named\. Set it to"),
        ({"model": {"overrides": {"x": 1}}}, r"^model\.path = None: no model is named"),
        ({"model": {"config": {"model_type": "llama"}}}, "model without weights cannot be served"),
        ({"model": {"path": "m", "overrides": {"x": 1}}}, r"model\.overrides = .*config\.json"),
        ({"model": {"path": "m"}, "server": {}}, r"server = .*Did you mean serve"),
        ({"model": {"path": "m"}, "serve": {"port": "x"}}, r"serve\.port = 'x'"),
        ({"model": {"path": "m"}, "serve": {"diary": {}}}, r"serve\.diary = .*no known key"),
    ],
)
def test_what_cannot_be_served_is_refused(tree: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        serve_config_from_tree(tree)


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^MODEL_OR_CONFIG = .* no such file or folder"):
        load_serve_config(tmp_path / "nothing")


def test_the_journal_lies_where_the_command_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_serve_config(tmp_path, ["serve.journal.dir=kept"])
    assert config.placed.journal.dir == str(tmp_path / "kept")
    assert config.placed.model_copy(update={"journal": config.serve.journal}) == config.serve
    assert load_serve_config(tmp_path).placed.journal.dir is None
