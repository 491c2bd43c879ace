"""``--set a.b=c``: values laid over the file's tree before it is validated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoal.config.yaml_text import read_scalar, read_yaml
from shoal.errors import ConfigError, ConfigErrors


def apply_overrides(tree: dict[str, Any], overrides: Sequence[str]) -> None:
    """Lay each ``key=value`` over ``tree`` in place; the last one of a key wins.

    A part of the key that is a number is the index of a list entry; the index one past the end
    appends. The value is a YAML scalar (``lr=1e-3``, ``clip=null``, ``path=*.py``), or, where it
    begins with ``[``, ``{`` or a quotation mark, YAML in flow style (``betas=[0.9, 0.99]``).

    Raises:
        ConfigError: for text that is no ``key=value`` or a key that leads through a plain value.
    """
    problems: list[ConfigError] = []
    for override in overrides:
        try:
            key, value = parse_override(override)
            _assign(tree, key, value)
        except ConfigError as problem:
            problems.append(problem)
    ConfigErrors.raise_any(problems)


def parse_override(override: str) -> tuple[str, Any]:
    """The dotted key and the value of one ``key=value``."""
    key, separator, text = override.partition("=")
    key, text = key.strip(), text.strip()
    if not separator or not all(key.split(".")):
        raise ConfigError("--set", override, "is not key=value", "Write --set section.key=value")
    if text[:1] in ("[", "{", '"', "'"):
        return key, read_yaml(text, f"--set {key}")
    return key, read_scalar(text)


def _assign(tree: dict[str, Any], key: str, value: Any) -> None:
    parts = key.split(".")
    place: Any = tree
    for depth, part in enumerate(parts):
        reached = ".".join(parts[:depth])
        last = depth == len(parts) - 1
        below: Any = None if last else ([] if parts[depth + 1].isdigit() else {})
        if isinstance(place, dict):
            if last:
                place[part] = value
                return
            if place.get(part) is None:
                place[part] = below
            place = place[part]
        elif isinstance(place, list):
            index = _index(place, part, key)
            if index == len(place):
                place.append(below)
            if last:
                place[index] = value
                return
            place = place[index]
        else:
            problem = f"{reached} is the plain value {place!r} and has no keys below it"
            raise ConfigError(f"--set {key}", value, problem, f"Set {reached} itself")


def _index(entries: list[Any], part: str, key: str) -> int:
    if not part.isdigit() or int(part) > len(entries):
        problem = f"{part} is no index of a list with {len(entries)} entries"
        remedy = f"Use an index from 0 to {len(entries)}, the last of which appends"
        raise ConfigError("--set", key, problem, remedy)
    return int(part)
