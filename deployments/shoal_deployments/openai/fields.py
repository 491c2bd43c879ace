"""Types of the request fields: strict, bounded before they are looked through, fit for a schema.

A list or a mapping is measured before its entries are checked: 4 MB of wrong entries would
otherwise cost a report on each. The limits come as the validation's context, a ``LimitSettings``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationInfo,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

from shoal.config import LimitSettings

REFUSED = "refused"
"""Type of the pydantic errors that say in this project's words what is wrong."""


def refusal(problem: str, remedy: str, **values: object) -> PydanticCustomError:
    """An error in this project's words; ``{name}`` in either text stands for one of ``values``.

    The value ``param`` names the field below the validated object that is meant.
    """
    return PydanticCustomError(REFUSED, f"{problem}. {remedy}", values or None)


def _limit(info: ValidationInfo, name: str) -> int:
    assert isinstance(info.context, LimitSettings)
    value: int = getattr(info.context, name)
    return value


def at_most(limit: str) -> BeforeValidator:
    """Refuse a list, mapping or text that is longer than the limit of that name."""

    def check(value: Any, info: ValidationInfo) -> Any:
        most = _limit(info, limit)
        if isinstance(value, list | dict | str) and len(value) > most:
            raise refusal(
                "it is {length} long and this server's limit is {most}",
                "Shorten it",
                length=len(value),
                most=most,
            )
        return value

    return BeforeValidator(check)


def _up_to(limit: str) -> AfterValidator:
    """Refuse a number above the limit of that name."""

    def check(value: int | None, info: ValidationInfo) -> int | None:
        most = _limit(info, limit)
        if value is not None and value > most:
            raise refusal("it is above this server's limit", "Ask for at most {most}", most=most)
        return value

    return AfterValidator(check)


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _token_keys(value: Any) -> Any:
    """Turn the keys of a mapping, which JSON has as text, into token ids."""
    if not isinstance(value, dict):
        return value
    biases: dict[int, Any] = {}
    for key, bias in value.items():
        # Only what JSON itself would write for the number: no sign, no blanks, no other digits.
        if not (key.isascii() and key.isdecimal() and len(key) <= 10 and str(int(key)) == key):
            raise refusal(
                "the key {key} is no token id", "Write ids as digits", key=ascii(key[:40])
            )
        biases[int(key)] = bias
    return biases


StopText: TypeAlias = Annotated[str, Field(min_length=1), at_most("stop_characters")]
Stop: TypeAlias = Annotated[
    Annotated[list[StopText], at_most("stops")] | None,
    BeforeValidator(_one_or_many),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "items": {"type": "string", "minLength": 1}},
                {"type": "null"},
            ]
        }
    ),
]
"""One text or several."""

TokenIds: TypeAlias = Annotated[list[Annotated[int, Field(ge=0)]], at_most("stops")]

LogitBias: TypeAlias = Annotated[
    dict[int, Annotated[float, Field(ge=-100, le=100)]] | None,
    BeforeValidator(_token_keys),
    at_most("logit_bias"),
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "object",
                    "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"},
                    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
                },
                {"type": "null"},
            ]
        }
    ),
]
"""Token ids, as text, and what is added to their logits."""

NumLogprobs: TypeAlias = Annotated[int | None, Field(ge=0), _up_to("logprobs")]

Prompt: TypeAlias = str | tuple[int, ...]
"""One prompt as the client gave it."""


def _prompts(value: Any, info: ValidationInfo) -> list[Prompt]:
    """The four forms of ``prompt`` as a list; the ids of a prompt are checked as a whole."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise refusal(
            "it is neither text, nor token ids, nor a list of either", "Send one of these"
        )
    if not value:
        raise refusal("it is empty", "Send at least one prompt of at least one token")
    if _are(int, value):
        return [tuple(value)]
    most = _limit(info, "prompts")
    if len(value) > most and isinstance(value[0], str | list):
        raise refusal(
            "it holds {count} prompts and this server's limit is {most}",
            "Send several requests",
            count=len(value),
            most=most,
        )
    if _are(str, value):
        return list(value)
    if _are(list, value) and all(_are(int, ids) for ids in value):
        return [tuple(ids) for ids in value]
    raise refusal("its entries are not all text, or all token ids", "Send lists of one kind")


def _are(kind: type, values: list[Any]) -> bool:
    # A truth value is an integer to isinstance.
    return set(map(type, values)) <= {kind}


_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
Prompts: TypeAlias = Annotated[
    list[Any],
    BeforeValidator(_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
                _IDS,
                {"type": "array", "items": _IDS, "minItems": 1},
            ]
        }
    ),
]
"""Text, token ids, or a list of either; afterwards a list of ``Prompt``."""


def _text_of_parts(value: Any) -> Any:
    """The text of a message's ``content``, which may come in parts; parts stand on lines."""
    if not isinstance(value, list):
        return value
    if not value:
        raise refusal("it has no part", "Send text")
    texts: list[str] = []
    for number, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise refusal(
                "part {number} is of the type {kind}, and only text is offered",
                'Send parts of the form {"type": "text", "text": "..."}',
                number=number,
                kind=ascii(kind)[:40],
            )
        if part.keys() != {"type", "text"} or not isinstance(part["text"], str):
            raise refusal(
                "part {number} is not well formed",
                'Send parts of the form {"type": "text", "text": "..."}',
                number=number,
            )
        texts.append(part["text"])
    return "\n".join(texts)


Content: TypeAlias = Annotated[
    str,
    BeforeValidator(_text_of_parts),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "type": "object",
                        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                        "required": ["type", "text"],
                        "additionalProperties": False,
                    },
                },
            ]
        }
    ),
]
"""Text, whole or in parts."""

Role: TypeAlias = Literal["system", "developer", "user", "assistant"]
