"""Log-probabilities in the two shapes that OpenAI's clients know.

The pieces of text come from the engine and joined are the text; a token that ends inside a
character has an empty piece, and the one that completes the character has all of it. Only the
likeliest tokens beside the chosen one are named by what they would be alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shoal.inference.protocol import TokenLogprob

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot say, as in OpenAI's API."""

NameOf = Callable[[int], str]


def completion_logprobs(
    entries: Sequence[TokenLogprob], start: int, name_of: NameOf
) -> dict[str, list[Any]]:
    """``logprobs`` of a completion; ``start`` is where the first entry's text begins in it."""
    return {
        "tokens": [entry.text for entry in entries],
        "token_logprobs": [_finite(entry.logprob) for entry in entries],
        "top_logprobs": [_alternatives(entry, name_of) for entry in entries],
        "text_offset": [start + entry.offset for entry in entries],
    }


def prompt_logprobs(
    first: str, entries: Sequence[TokenLogprob | None], name_of: NameOf
) -> dict[str, list[Any]]:
    """``logprobs`` of an echoed prompt, of whose ``first`` token nothing can be said."""
    rest = completion_logprobs([entry for entry in entries if entry is not None], 0, name_of)
    heads = {"tokens": first, "token_logprobs": None, "top_logprobs": None, "text_offset": 0}
    return {name: [head, *rest[name]] for name, head in heads.items()}


def chat_logprobs(entries: Sequence[TokenLogprob], name_of: NameOf) -> dict[str, Any]:
    """``logprobs`` of a chat's choice."""
    return {
        "content": [
            {
                **_named(entry.text, entry.logprob),
                "top_logprobs": [
                    _named(entry.text if token == entry.token else name_of(token), logprob)
                    for token, logprob in entry.top
                ],
            }
            for entry in entries
        ],
        "refusal": None,
    }


def _alternatives(entry: TokenLogprob, name_of: NameOf) -> dict[str, float]:
    """The chosen token and the likeliest by their text; of equal texts the likelier counts."""
    named = {entry.text: _finite(entry.logprob)}
    for token, logprob in entry.top:
        if token != entry.token:
            named.setdefault(name_of(token), _finite(logprob))
    return named


def _named(text: str, logprob: float) -> dict[str, Any]:
    return {
        "token": text,
        "logprob": _finite(logprob),
        "bytes": list(text.encode("utf-8", "replace")),
    }


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
