"""The base of every section of the configuration tree."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from annotated_types import Le, Lt
from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from shoal.errors import ConfigError

MOST = 10**12
"""What a whole number may be where its field sets no bound of its own."""

MOST_S = 10**9
"""What a number of seconds may be: 30 years, which every clock and every wait can count."""

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

    @field_validator("*")
    @classmethod
    def _check_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse a number that nothing could count to."""
        assert info.field_name is not None
        bounds = cls.model_fields[info.field_name].metadata
        is_bounded = any(isinstance(bound, Le | Lt) for bound in bounds)
        is_time = info.field_name.endswith("_s")
        most = MOST_S if is_time else MOST
        if isinstance(value, int | float if is_time else int) and value > most and not is_bounded:
            refuse([ConfigError("", value, f"must be at most {most}", "Use a smaller number")])
        return value

    @field_validator("*")
    @classmethod
    def _check_text(cls, value: Any) -> Any:
        """Refuse text that neither a path nor ``config.yaml`` can hold."""
        if isinstance(value, str) and ("\0" in value or not _is_unicode(value)):
            problem = "holds a NUL or half a character"
            refuse([ConfigError("", value, problem, "Write plain UTF-8 text")])
        return value


def _is_unicode(text: str) -> bool:
    """False where a surrogate stands alone, as for an argument that is not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def refuse(found: Sequence[ConfigError]) -> None:
    """Raise what a section's validator found; the fields are relative to the section."""
    if found:
        text = " ".join(str(problem) for problem in found)
        raise PydanticCustomError(MISTAKE, "{text}", {"text": text, "found": tuple(found)})


def in_vain(section: Section, names: Iterable[str], problem: str, remedy: str) -> list[ConfigError]:
    """A refusal of each field of ``names`` that was given though nothing reads it.

    The default is as good as left out: resolved configurations hold every one.
    """
    found = []
    for name in names:
        value = getattr(section, name)
        if value != type(section).model_fields[name].default:
            plain = list(value) if isinstance(value, tuple) else value
            found.append(ConfigError(name, plain, problem, remedy))
    return found
