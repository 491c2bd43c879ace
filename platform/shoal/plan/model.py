"""Which model a configuration names."""

from __future__ import annotations

from pathlib import Path

from shoal.config import ModelSettings
from shoal.errors import ConfigError
from shoal.models import DecoderConfig, read_hf_config


def read_decoder_config(settings: ModelSettings) -> DecoderConfig:
    """The decoder that ``model`` names: its folder's or inline config under ``overrides``.

    Raises:
        ConfigError: for a folder without a readable ``config.json`` and for every family, feature
            or value that is not supported.
    """
    if settings.path is None:
        assert settings.config is not None, "a ModelSettings names one model"
        return DecoderConfig.from_hf({**settings.config, **settings.overrides})
    folder = Path(settings.path)
    if not folder.is_dir():
        problem = "there is no such folder"
        remedy = "Give a Hugging Face folder; `shoal import SOURCE OUT` makes one"
        raise ConfigError("model.path", settings.path, problem, remedy)
    return DecoderConfig.from_hf({**read_hf_config(folder), **settings.overrides})
