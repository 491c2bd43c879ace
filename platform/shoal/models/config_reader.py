"""Checked access to the values of a Hugging Face config."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Any

from shoal.errors import ConfigError
from shoal.models.families import Family

# Keys that every family knows besides its defaults.
_COMMON_KEYS = frozenset(
    {"model_type", "architectures", "rope_parameters", "rope_scaling", "num_local_experts"}
    | {"torch_dtype", "dtype", "use_cache", "pad_token_id", "bos_token_id", "eos_token_id"}
    | {"transformers_version", "output_router_logits", "pretraining_tp", "layer_types"}
    | {"max_window_layers", "quantization_config", "original_max_position_embeddings"}
)
_TYPO_SIMILARITY = 0.87


class ConfigReader:
    """Values of a config, checked as they are read."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def get(self, key: str) -> Any:
        """The value as it is; None where there is none."""
        return self._values.get(key)

    def error(self, key: str, problem: str, remedy: str) -> ConfigError:
        """The refusal of a key's value."""
        return ConfigError(f"model.config.{key}", self._values.get(key), problem, remedy)

    def count(self, key: str, default: int | None = None, most: int = 2**24, least: int = 1) -> int:
        """A whole number from ``least`` to ``most``; ``default`` stands for null."""
        value = self._values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.error(key, f"it must be a whole number of at least {least}", f"Set {key}")
        if value > most:
            raise self.error(key, f"it must be at most {most:,}", "Use a smaller number")
        return value

    def number(self, key: str) -> float:
        """A finite number of at least 0."""
        value = self._values.get(key)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 <= value < math.inf
        ):
            raise self.error(key, "it must be a number of at least 0", f"Set {key}")
        return float(value)

    def flag(self, key: str) -> bool:
        """True or false; null is false."""
        value = self._values.get(key)
        if value not in (None, False, True):
            raise self.error(key, "it must be true or false", f"Set {key} to true or false")
        return bool(value)


def refuse_typos(hf: Mapping[str, Any], family: Family) -> None:
    """Raise ``ConfigError`` for a key that looks like a misspelling of one the family reads."""
    # Real files carry many keys of other programs, so only those that look like a misspelling of
    # a key this family reads, and that is absent, are refused.
    known = set(family.defaults) | _COMMON_KEYS
    for key in hf:
        if key in known:
            continue
        near = difflib.get_close_matches(key, known - set(hf), n=1, cutoff=_TYPO_SIMILARITY)
        if near:
            raise ConfigError(
                f"model.config.{key}", hf[key], "there is no such key", f"Did you mean {near[0]}?"
            )
