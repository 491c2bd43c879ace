"""From a JSON object to a checked body, or to the refusal that names its first wrong field."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import ValidationError

from shoal.config import LimitSettings
from shoal_deployments.openai.errors import ApiError, bad_field
from shoal_deployments.openai.requests import UNKNOWN, GenerationBody
from shoal_deployments.openai.unsupported import drop_unsupported

BodyT = TypeVar("BodyT", bound=GenerationBody)


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
    more = f" {num_more} more fields are wrong." if num_more else ""
    if detail["type"] == "missing":
        return ApiError(400, f"{param} is missing.{more}", param=param, code="missing_field")
    problem, _, remedy = detail["msg"].rpartition(". ")
    if "param" in context:  # what was wrong is the whole, not the value of one field
        code = "unknown_parameter" if detail["type"] == UNKNOWN else "invalid_value"
        return ApiError(400, f"{param}: {problem}. {remedy}.{more}", param=param, code=code)
    if not problem:  # pydantic's own words are one sentence
        problem, remedy = detail["msg"], "Correct it"
    refusal = bad_field(param, detail["input"], problem, remedy)
    refusal.message += more
    return refusal


def _path(place: tuple[int | str, ...]) -> str:
    """``messages[0].content``; a name that a client made up is cut short."""
    path = ""
    for part in place:
        path += f"[{part}]" if isinstance(part, int) else f".{ascii(part[:64])[1:-1]}"
    return path.removeprefix(".")
