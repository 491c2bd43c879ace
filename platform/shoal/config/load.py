"""From a YAML file and ``--set`` overrides to a checked tree, and back to YAML."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shoal.config.overrides import apply_overrides
from shoal.config.problems import config_errors
from shoal.config.tree import Config
from shoal.config.yaml_text import read_yaml, write_yaml
from shoal.errors import ConfigError, ConfigErrors


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration in the file at ``path`` with ``overrides`` (``key=value``) laid over it.

    Raises:
        ConfigError: for a file that cannot be read or is no mapping, and for every wrong key and
            value in it, all in one message.
    """
    return config_from_tree(load_tree(path, overrides))


def load_tree(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The plain values in the file at ``path`` with ``overrides`` over them, not yet checked."""
    tree = read_tree(path)
    apply_overrides(tree, overrides)
    return tree


def config_from_tree(tree: dict[str, Any]) -> Config:
    """The configuration that plain values (mappings, lists, text, numbers) describe."""
    ConfigErrors.raise_any(list(_unwritable_texts(tree, "")))
    try:
        # Lists stand for tuples and words for enum members in JSON mode only, and strictness
        # (no text for a number, no number for text) holds there as well.
        return Config.model_validate_json(json.dumps(tree))
    except ValidationError as error:
        problems = config_errors(error)
    ConfigErrors.raise_any(problems)
    raise AssertionError("pydantic refused the tree without saying why")


def _unwritable_texts(value: Any, field: str) -> Iterator[ConfigError]:
    """A refusal of each text that neither a path nor a file in UTF-8 can hold."""
    if isinstance(value, dict | list):
        for key, below in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _unwritable_texts(below, f"{field}.{key}" if field else str(key))
    elif isinstance(value, str):
        # A surrogate stands for a byte of an argument that is not UTF-8.
        if "\0" in value or any("\ud800" <= character <= "\udfff" for character in value):
            problem = "holds a NUL or a character that UTF-8 lacks"
            yield ConfigError(field, value, problem, "Write it as plain UTF-8 text")


def dump_config(config: Config) -> str:
    """The whole tree, defaults included, as YAML that ``load_config`` reads back as its equal."""
    return write_yaml(config.model_dump(mode="json"))


def read_tree(path: Path) -> dict[str, Any]:
    """The plain values in the YAML file at ``path``; ConfigError where it holds no mapping."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(
            "CONFIG", str(path), "there is no such file", "Give the path of a YAML file"
        ) from error
    except IsADirectoryError as error:
        remedy = "Give the path of the YAML file in it"
        raise ConfigError("CONFIG", str(path), "is a folder", remedy) from error
    except UnicodeDecodeError as error:
        remedy = "Save it as plain UTF-8 text"
        raise ConfigError("CONFIG", str(path), "is not UTF-8 text", remedy) from error
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
        raise ConfigError("CONFIG", str(path), problem, "Make the file readable") from error
    tree = read_yaml(text, str(path))
    if not isinstance(tree, dict):
        problem = "the file is empty" if tree is None else "the file holds no mapping"
        remedy = (
            "Begin with the keys model, data.sources and train.steps, or to serve with model.path "
            "and serve"
        )
        raise ConfigError("CONFIG", str(path), problem, remedy)
    return tree
