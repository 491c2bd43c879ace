"""Every key of the tree as a value: what the reference page and the messages are made from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from shoal.config.section import Section
from shoal.config.tree import Config

_TYPE_WORDS: dict[object, str] = {
    bool: "true or false",
    int: "integer",
    float: "number",
    str: "text",
    Any: "any",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key of the YAML tree."""

    path: str
    """Dotted path; an entry of a list has ``*`` for its index."""

    type: str
    """What the value may be, in words."""

    default: Any
    """The default as a plain value; meaningless where ``required``."""

    required: bool
    """Whether the key has no default."""

    meaning: str
    """The docstring of the field."""

    section: bool
    """Whether other keys live below it."""


def all_keys() -> Iterator[Key]:
    """Every key of the tree, each section before its keys, in the order of the file."""
    yield from _keys_of(Config, "")


def _keys_of(section: type[Section], prefix: str) -> Iterator[Key]:
    for name, field in section.model_fields.items():
        path = prefix + name
        below, separator = _section_below(field.annotation)
        yield Key(
            path=path,
            type=_type_words(field, below),
            default=None if field.is_required() else _plain_default(field),
            required=field.is_required(),
            meaning=" ".join((field.description or "").split()),
            section=below is not None,
        )
        if below is not None:
            yield from _keys_of(below, path + separator)


def _section_below(annotation: Any) -> tuple[type[Section] | None, str]:
    """The section that the annotation holds and what joins its path to the keys below."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation, "."
    for argument in get_args(annotation):
        if isinstance(argument, type) and issubclass(argument, Section):
            return argument, ".*."
    return None, ""


def _plain_default(field: FieldInfo) -> Any:
    default = field.get_default(call_default_factory=True)
    if isinstance(default, Section):
        return default.model_dump(mode="json")
    if isinstance(default, Enum):
        return default.value
    return list(default) if isinstance(default, tuple) else default


def _type_words(field: FieldInfo, below: type[Section] | None) -> str:
    if below is not None:
        return "mapping" if below is field.annotation else "list of mappings"
    words, null, _ = _annotation_words(field.annotation).partition(" or null")
    bounds = [words, *_bounds(field)]
    return " ".join(bounds) + (null and (f",{null}" if len(bounds) > 1 else null))


def _annotation_words(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{argument}`" for argument in arguments)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return ", ".join(f"`{member.value}`" for member in annotation)
    if origin is dict:
        return "mapping"
    if origin is tuple and arguments[-1] is Ellipsis:
        return f"list of {_annotation_words(arguments[0])}"
    if origin is tuple:
        return f"list of {len(arguments)} {_annotation_words(arguments[0])}s"
    if NoneType in arguments:
        others = [argument for argument in arguments if argument is not NoneType]
        return " or ".join([*(_annotation_words(other) for other in others), "null"])
    return _TYPE_WORDS[annotation]


def _bounds(field: FieldInfo) -> Iterator[str]:
    for bound in field.metadata:
        match bound:
            case Ge(ge=least):
                yield f"≥ {least}"
            case Gt(gt=below):
                yield f"> {below}"
            case Le(le=most):
                yield f"≤ {most}"
            case Lt(lt=above):
                yield f"< {above}"
