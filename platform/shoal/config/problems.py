"""Turns what pydantic found wrong into this project's words: field, value, problem, remedy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError

from shoal.config.keys import Key, all_keys
from shoal.config.section import MISTAKE
from shoal.errors import ConfigError

_TYPE_PROBLEMS = {
    "int": ("must be an integer", "Write a whole number"),
    "float": ("must be a number", "Write a number such as 0.1 or 1e-3"),
    "bool": ("must be a truth value", "Write true or false"),
    "string": ("must be text", "Write text"),
    "tuple": ("must be a list", "Write a list, such as [a, b]"),
    "model": ("must be a mapping", "Write keys below it, or leave it out"),
    "dict": ("must be a mapping", "Write keys below it, or leave it out"),
    "finite": ("must be a finite number", "Write a number such as 0.1 or 1e-3"),
}
BOUNDS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "more than"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "less than"),
}
"""For each kind of bound its name in pydantic's context, and words for it."""

_FORMS = {
    "run.name": (
        "must be letters, digits, '.', '_' or '-', 200 at most, and begin with a letter or a digit",
        "Choose a name such as my-run.2",
    ),
    "serve.model_name": (
        "must be letters, digits, '.', '_', '/', ':' or '-', 200 at most, "
        "and begin with a letter or a digit",
        "Choose a name such as my-team/my-model",
    ),
    "serve.auth.keys_variable": (
        "must be letters, digits or '_', and not begin with a digit",
        "Give the name of an environment variable, such as SHOAL_KEYS",
    ),
}
"""What text must be where a pattern says so."""


def config_errors(error: ValidationError) -> list[ConfigError]:
    """Each thing that pydantic found, once, in the order of the tree."""
    details = error.errors(include_url=False)
    places = [tuple(detail["loc"]) for detail in details]
    found: list[ConfigError] = []
    for place, detail in zip(places, details, strict=True):
        # A list whose entries are wrong is also reported as too short: say what is wrong only.
        wrong_below = any(other != place and other[: len(place)] == place for other in places)
        if not (detail["type"] == "too_short" and wrong_below):
            found.extend(_config_errors(place, detail))
    return found


def _config_errors(place: tuple[int | str, ...], detail: Any) -> Iterator[ConfigError]:
    field, value, context = ".".join(map(str, place)), detail["input"], detail.get("ctx", {})
    kind: str = detail["type"]
    if kind == MISTAKE:
        for mistake in context["found"]:
            inner = ".".join(filter(None, [field, mistake.field]))
            yield ConfigError(inner, mistake.value, mistake.problem, mistake.remedy)
    elif kind == "extra_forbidden":
        yield unknown_key(field, value)
    elif kind == "missing":
        yield _missing(place)
    elif kind in ("literal_error", "enum"):
        yield _not_one_of(field, value)
    elif kind in BOUNDS:
        name, words = BOUNDS[kind]
        bound = f"{words} {context[name]}"
        yield ConfigError(field, value, f"must be {bound}", f"Use a number that is {bound}")
    elif kind in ("too_short", "string_too_short"):
        yield ConfigError(field, value, "must not be empty", "Give one, or leave the key out")
    elif kind == "too_long":
        length = context["max_length"]
        yield ConfigError(field, value, f"has more than {length} entries", f"Write {length}")
    elif kind == "string_pattern_mismatch":
        yield ConfigError(field, value, *_FORMS[field])
    else:
        yield _wrong_type(field, value, kind, detail["msg"])


def unknown_key(field: str, value: object) -> ConfigError:
    """The refusal of a key that does not exist, with the nearest one that does."""
    known = [key.path for key in all_keys()]
    # An index of a list is ``*`` in the names of the known keys.
    general = ".".join("*" if part.isdigit() else part for part in field.split("."))
    parent, _, name = general.rpartition(".")
    siblings = [path for path in known if path.rpartition(".")[0] == parent]
    names = [path.rpartition(".")[2] for path in siblings]
    elsewhere = [path for path in known if path.rpartition(".")[2] == name]
    given_parent = field.rpartition(".")[0]
    if close := get_close_matches(name, names, n=1, cutoff=0.6):
        remedy = f"Did you mean {'.'.join(filter(None, [given_parent, close[0]]))}?"
    elif elsewhere:
        remedy = f"Did you mean {elsewhere[0]}?"
    elif siblings:
        remedy = f"The keys of {parent or 'the file'} are {', '.join(sorted(names))}"
    else:
        remedy = f"{parent} has no keys below it"
    return ConfigError(field, _short(value), "is no known key", remedy)


def _missing(place: Sequence[int | str]) -> ConfigError:
    field = ".".join(map(str, place))
    key = _key(field)
    if key is None:  # an entry of a list of fixed length
        return ConfigError(field, None, "the list is too short", "Write one more entry")
    if key.section:
        below = [other for other in all_keys() if other.path.rpartition(".")[0] == field]
        names = [other.path for other in below if other.required] or [k.path for k in below]
        remedy = f"Write it with {', '.join(names)}"
        return ConfigError(field, None, "is required and has no default", remedy)
    what = key.meaning.rstrip(".").partition(". ")[0]
    return ConfigError(field, None, "is required and has no default", f"Set it: {what.lower()}")


def _not_one_of(field: str, value: object) -> ConfigError:
    key = _key(field)
    assert key is not None
    choices = key.type.removesuffix(" or null").replace("`", "").split(", ")
    remedy = f"Use one of {', '.join(choices)}"
    if close := get_close_matches(str(value), choices, n=1):
        remedy += f"; did you mean {close[0]}"
    return ConfigError(field, value, "is none of the choices", remedy)


def _wrong_type(field: str, value: Any, kind: str, message: str) -> ConfigError:
    problem, remedy = _TYPE_PROBLEMS.get(kind.partition("_")[0], (message, "Correct it"))
    if kind == "int_type" and isinstance(value, float) and value.is_integer():
        remedy = f"Write {int(value)}"
    elif kind == "string_type" and isinstance(value, int | float):
        remedy = f'Put it in quotes: "{str(value).lower() if isinstance(value, bool) else value}"'
    return ConfigError(field, _short(value), problem, remedy)


def _key(field: str) -> Key | None:
    general = ".".join("*" if part.isdigit() else part for part in field.split("."))
    return next((key for key in all_keys() if key.path == general), None)


def _short(value: object) -> object:
    """The value itself, or for a large tree only its kind, so that the message stays one line."""
    if isinstance(value, dict) and value:
        return {**dict(list(value.items())[:2]), **({"…": "…"} if len(value) > 2 else {})}
    return value
