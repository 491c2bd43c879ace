"""The base of every section of the configuration tree."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticCustomError

from shoal.errors import ConfigError

MISTAKE = "mistake"
"""Type of the pydantic errors that ``refuse`` raises."""


class Section(BaseModel):
    """One mapping of the YAML file: frozen, unknown keys refused, each field documented."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )


def refuse(found: Sequence[ConfigError]) -> None:
    """Raise what a section's validator found; the fields are relative to the section."""
    if found:
        text = " ".join(str(problem) for problem in found)
        raise PydanticCustomError(MISTAKE, "{text}", {"text": text, "found": tuple(found)})
