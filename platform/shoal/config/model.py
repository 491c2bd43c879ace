"""Which model is trained."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from shoal.config.section import Section


class ModelSettings(Section):
    """``model``: a Hugging Face folder (``path``) or an inline Hugging Face config (``config``)."""

    path: str | None = None
    """Folder with ``config.json``, safetensors weights and, optionally, a tokenizer."""

    config: dict[str, Any] | None = None
    """Inline Hugging Face config; the weights start from ``run.seed``."""

    overrides: dict[str, Any] = Field(default_factory=dict)
    """Values laid over the model's Hugging Face config, for example ``{attention_dropout: 0.1}``."""
