"""Fields that OpenAI's clients may send and this server does not offer, or need not heed.

A field that would change the answer is refused unless its value asks for nothing; one that would
not is taken and has no effect. Fields that nobody knows are refused by the request models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shoal_deployments.openai.errors import bad_field

UNHEEDED = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""Notes for the operator, hints for speed and shapes of answers that cannot occur."""


@dataclass(frozen=True, slots=True)
class Unsupported:
    """What one field would ask for, and which of its values ask for nothing; null never does."""

    what: str
    neutral: tuple[Any, ...] = ()


UNSUPPORTED = {
    "audio": Unsupported("audio is not offered"),
    "function_call": Unsupported("function calls are not offered", ("none", "auto")),
    "functions": Unsupported("function calls are not offered", ([],)),
    "modalities": Unsupported("only text is offered", (["text"], [])),
    "moderation": Unsupported("moderation is not offered"),
    "reasoning_effort": Unsupported("degrees of reasoning are not offered", ("none",)),
    "suffix": Unsupported("text after the gap is not heeded by these models", ("",)),
    "tool_choice": Unsupported("tools are not offered", ("none", "auto")),
    "tools": Unsupported("tools are not offered", ([],)),
    "verbosity": Unsupported("degrees of verbosity are not offered", ("medium",)),
    "web_search_options": Unsupported("web search is not offered"),
}


def drop_unsupported(content: dict[str, Any], known: frozenset[str]) -> dict[str, Any]:
    """``content`` without the fields above, those in ``known`` excepted.

    Raises:
        ApiError: 400 for a field that asks for what is not offered.
    """
    _check_response_format(content.get("response_format"))
    for name in content.keys() & UNSUPPORTED.keys() - known:
        value, field = content[name], UNSUPPORTED[name]
        if value is not None and value not in field.neutral:
            raise bad_field(name, value, field.what, "Leave it out", "unsupported_parameter")
    dropped = (UNHEEDED | UNSUPPORTED.keys() | {"response_format"}) - known
    return {name: value for name, value in content.items() if name not in dropped}


def _check_response_format(value: object) -> None:
    """Refuse all but plain text: guided decoding is not offered."""
    if value is None or value == {"type": "text"}:
        return
    code = "unsupported_parameter"
    remedy = 'Leave it out, or send {"type": "text"}'
    if not isinstance(value, dict):
        raise bad_field("response_format", value, "it is not an object", remedy)
    kind = value.get("type")
    if kind in ("json_object", "json_schema"):
        what = "answers bound to a grammar are not offered"
        raise bad_field("response_format.type", kind, what, remedy, code)
    if kind != "text":
        raise bad_field("response_format.type", kind, "it is no known type", remedy)
    raise bad_field("response_format", value, "text has no further settings", remedy)


def refuse_best_of(best_of: int | None, n: int) -> None:
    """Refuse to draw more answers than are returned."""
    if best_of is not None and best_of != n:
        problem = f"it differs from n, {n}, and answers are not ranked"
        raise bad_field("best_of", best_of, problem, "Leave it out", "unsupported_parameter")
