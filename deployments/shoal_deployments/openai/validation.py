"""From a JSON object to a checked body, or to the refusal that names its first wrong field."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import ValidationError

from shoal.config import LimitSettings
from shoal.config.problems import BOUNDS
from shoal_deployments.openai.errors import ApiError, bad_field
from shoal_deployments.openai.fields import REFUSED
from shoal_deployments.openai.requests import UNKNOWN, GenerationBody
from shoal_deployments.openai.unsupported import drop_unsupported

BodyT = TypeVar("BodyT", bound=GenerationBody)

_TYPES = {
    "bool": ("it is not a truth value", "Send true or false"),
    "dict": ("it is not an object", "Send a JSON object"),
    "finite": ("it is not a finite number", "Send one that is"),
    "float": ("it is not a number", "Send a number"),
    "int": ("it is not a whole number", "Send one without a fraction or exponent"),
    "list": ("it is not a list", "Send a JSON array"),
    "model": ("it is not an object", "Send a JSON object"),
    "string": ("it is not text", "Send a string"),
}
"""For the first word of pydantic's error types what is wrong, and what helps."""
_OTHER = ("it is not what this field takes", "GET /openapi.json says what it is")


def parse_body(kind: type[BodyT], content: dict[str, Any], limits: LimitSettings) -> BodyT:
    """The body that ``content`` describes; ApiError, status 400, for what is wrong with it."""
    content = drop_unsupported(content, frozenset(kind.model_fields))
    try:
        return kind.model_validate(content, context=limits)
    except ValidationError as error:
        details = error.errors(include_url=False)
    raise _refusal(details[0], len(details) - 1)


def _refusal(detail: Any, num_more: int) -> ApiError:
    context = detail.get("ctx", {})
    param = _path(detail["loc"] + ((context["param"],) if "param" in context else ()))
    more = f" Others are wrong as well: {num_more}." if num_more else ""
    if detail["type"] == "missing":
        return ApiError(400, f"{param} is missing.{more}", param=param, code="missing_field")
    problem, remedy = _words(detail["type"], detail["msg"], context)
    if "param" in context:  # what was wrong is the whole, not the value of one field
        code = "unknown_parameter" if detail["type"] == UNKNOWN else "invalid_value"
        return ApiError(400, f"{param}: {problem}. {remedy}.{more}", param=param, code=code)
    refusal = bad_field(param, detail["input"], problem, remedy)
    refusal.message += more
    return refusal


def _words(kind: str, message: str, context: dict[str, Any]) -> tuple[str, str]:
    """What is wrong and what helps, for a kind of pydantic's errors; ours say both themselves."""
    if kind in (REFUSED, UNKNOWN):
        problem, _, remedy = message.rpartition(". ")
        return problem, remedy
    if kind in BOUNDS:
        name, words = BOUNDS[kind]
        return "it is out of range", f"Send a number that is {words} {context[name]}"
    if kind == "literal_error":
        return "it is none of the choices", f"Send {context['expected']}"
    if kind in ("too_short", "string_too_short"):
        return "it is empty", "Send at least one entry" if kind == "too_short" else "Send text"
    return _TYPES.get(kind.partition("_")[0], _OTHER)


def _path(place: tuple[int | str, ...]) -> str:
    """``messages[0].content``; a name that a client made up is cut short."""
    path = ""
    for part in place:
        path += f"[{part}]" if isinstance(part, int) else f".{ascii(part[:64])[1:-1]}"
    return path.removeprefix(".")
