"""What ``shoal serve`` reads: a model and how it is served."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError, model_validator

from shoal.config.load import config_from_tree, read_tree
from shoal.config.model import ModelSettings
from shoal.config.overrides import apply_overrides
from shoal.config.problems import config_errors
from shoal.config.section import Section, refuse
from shoal.config.serve import ServeSettings
from shoal.config.tree import Config
from shoal.errors import ConfigError, ConfigErrors

_TRAINING = frozenset(Config.model_fields) - {"model", "serve"}


class ServeConfig(Section):
    """The part of the tree that serving needs."""

    model: ModelSettings
    """The model that is served; its ``path`` is required."""
    serve: ServeSettings = ServeSettings()
    """How it is served."""

    @model_validator(mode="before")
    @classmethod
    def _names_a_folder(cls, tree: dict[str, Any]) -> dict[str, Any]:
        """Ask for ``model.path`` alone where no model is named: only training takes others."""
        model = tree.get("model")
        if model is None or (isinstance(model, dict) and not model.keys() & {"path", "config"}):
            remedy = "Set it to a Hugging Face folder; shoal export writes one"
            refuse([ConfigError("model.path", None, "no model is named", remedy)])
        return tree

    @model_validator(mode="after")
    def _has_weights(self) -> ServeConfig:
        if self.model.path is None:
            refuse(
                [
                    ConfigError(
                        "model.config",
                        "{…}",
                        "a model without weights cannot be served",
                        "Set model.path to a Hugging Face folder; shoal export writes one",
                    )
                ]
            )
        if self.model.overrides:
            refuse(
                [
                    ConfigError(
                        "model.overrides",
                        self.model.overrides,
                        "a model is served as its folder says",
                        "Change config.json in the folder",
                    )
                ]
            )
        return self

    @property
    def folder(self) -> Path:
        """The model's folder, absolute."""
        assert self.model.path is not None
        return Path(self.model.path).absolute()

    @property
    def placed(self) -> ServeSettings:
        """``serve`` with its paths absolute, for processes that run in other folders."""
        journal = self.serve.journal
        if journal.dir is None:
            return self.serve
        journal = journal.model_copy(update={"dir": str(Path(journal.dir).absolute())})
        return self.serve.model_copy(update={"journal": journal})

    @property
    def served_name(self) -> str:
        """What clients write in ``model``."""
        # Of "..", too, the folder has a name.
        return self.serve.model_name or os.path.basename(os.path.abspath(self.folder))


def load_serve_config(path: Path, overrides: Sequence[str] = ()) -> ServeConfig:
    """The model in the folder at ``path``, or what the YAML file there says, with ``overrides``.

    A file that also describes a training run is checked as a whole.

    Raises:
        ConfigError: for what cannot be read, and for every wrong key and value, in one message.
    """
    return serve_config_from_tree(load_serve_tree(path, overrides))


def load_serve_tree(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The plain values that ``load_serve_config`` takes, not yet checked."""
    if not path.exists():
        raise ConfigError(
            "MODEL_OR_CONFIG",
            str(path),
            "there is no such file or folder",
            "Give the folder of a Hugging Face model, or a YAML file",
        )
    tree: dict[str, Any] = {"model": {"path": str(path)}} if path.is_dir() else read_tree(path)
    apply_overrides(tree, overrides)
    return tree


def describes_training(tree: dict[str, Any]) -> bool:
    """Whether a file's plain values are meant for training, and not for serving alone.

    What has neither keys of training nor anything to serve may be the beginning of a run's file.
    """
    model = tree.get("model")
    names_folder = isinstance(model, dict) and "path" in model
    return bool(_TRAINING & tree.keys()) or not ("serve" in tree or names_folder)


def serve_config_from_tree(tree: dict[str, Any]) -> ServeConfig:
    """What plain values (mappings, lists, text, numbers) describe."""
    if _TRAINING & tree.keys():
        config = config_from_tree(tree)
        tree = config.model_dump(mode="json", include={"model", "serve"})
    try:
        return ServeConfig.model_validate_json(json.dumps(tree))
    except ValidationError as error:
        problems = config_errors(error)
    ConfigErrors.raise_any(problems)
    raise AssertionError("pydantic refused the tree without saying why")
