"""Log-probabilities in the two shapes that OpenAI's clients know.

The pieces of text come from the engine and joined are the text; a token that ends inside a
character has an empty piece, and the one that completes the character has all of it. Only the
likeliest tokens beside the chosen one are named by what they would be alone. A token's bytes are
its own, whatever its piece is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoal.inference.protocol import TokenLogprob
from shoal.inference.text.token_names import TokenNames, by_id

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot say, as in OpenAI's API."""


def completion_logprobs(
    entries: Sequence[TokenLogprob], start: int, names: TokenNames
) -> dict[str, list[Any]]:
    """``logprobs`` of a completion; ``start`` is where the first entry's text begins in it."""
    return {
        "tokens": [entry.text for entry in entries],
        "token_logprobs": [_finite(entry.logprob) for entry in entries],
        "top_logprobs": [_alternatives(entry, names) for entry in entries],
        "text_offset": [start + entry.offset for entry in entries],
    }


def prompt_logprobs(
    first: str, entries: Sequence[TokenLogprob | None], names: TokenNames
) -> dict[str, list[Any]]:
    """``logprobs`` of an echoed prompt, of whose ``first`` token nothing can be said."""
    rest = completion_logprobs([entry for entry in entries if entry is not None], 0, names)
    heads = {"tokens": first, "token_logprobs": None, "top_logprobs": None, "text_offset": 0}
    return {name: [head, *rest[name]] for name, head in heads.items()}


def chat_logprobs(entries: Sequence[TokenLogprob], names: TokenNames) -> dict[str, Any]:
    """``logprobs`` of a chat's choice."""
    return {
        "content": [
            {
                **_named(entry.text, entry.logprob, names.of(entry.token).data),
                "top_logprobs": [
                    _named(
                        entry.text if token == entry.token else names.of(token).text,
                        logprob,
                        names.of(token).data,
                    )
                    for token, logprob in entry.top
                ],
            }
            for entry in entries
        ],
        "refusal": None,
    }


def _alternatives(entry: TokenLogprob, names: TokenNames) -> dict[str, float]:
    """The chosen token by its piece and the likeliest by their names, or ids where one is taken."""
    named = {entry.text: _finite(entry.logprob)}
    for token, logprob in entry.top:
        if token != entry.token:
            name = names.of(token).text
            named[by_id(token) if name in named else name] = _finite(logprob)
    return named


def _named(text: str, logprob: float, data: bytes | None) -> dict[str, Any]:
    return {
        "token": text,
        "logprob": _finite(logprob),
        "bytes": None if data is None else list(data),
    }


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
