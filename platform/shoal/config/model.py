"""Which model is trained."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from shoal.config.section import Section, refuse
from shoal.errors import ConfigError


class ModelSettings(Section):
    """``model``: a Hugging Face folder (``path``) or an inline Hugging Face config (``config``)."""

    path: str | None = Field(default=None, min_length=1)
    """Folder with ``config.json``, safetensors weights and, optionally, a tokenizer."""

    config: dict[str, Any] | None = None
    """Inline Hugging Face config; the weights are drawn from ``run.seed``."""

    overrides: dict[str, Any] = Field(default_factory=dict)
    """Values laid over the model's Hugging Face config, for example ``{attention_dropout: 0.1}``.
    """

    @model_validator(mode="after")
    def _names_one_model(self) -> ModelSettings:
        if self.path is not None and self.config is not None:
            remedy = "Keep model.path to go on from weights or model.config to start from none"
            refuse([ConfigError("path", self.path, "model.config is given too", remedy)])
        if self.path is None and self.config is None:
            remedy = "Set model.path to a Hugging Face folder or model.config to an inline config"
            refuse([ConfigError("path", None, "no model is named", remedy)])
        return self
