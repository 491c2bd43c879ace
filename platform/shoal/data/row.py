"""From one row of JSONL or Parquet to a document."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from shoal.config import SourceSettings
from shoal.data.document import ChatDocument, Document, Origin, TextDocument
from shoal.errors import ConfigError


def document_of(
    row: Mapping[str, Any],
    source: SourceSettings,
    field: str,
    origin: Origin,
    *,
    is_repaired: bool = False,
) -> Document:
    """Take a row's messages if it has them, else its text; ConfigError on ``field`` if neither."""
    messages = row.get(source.messages_key)
    if messages is not None:
        return ChatDocument(messages=messages, origin=origin, is_repaired=is_repaired)
    check_keys(row, source, field, origin)
    text = row.get(source.text_key)
    if not isinstance(text, str):
        raise ConfigError(
            f"{field}.text_key",
            source.text_key,
            f"its value in {origin} is {text!r:.80}, not text",
            "Name a key that holds text, or drop such rows",
        )
    return TextDocument(text=text, origin=origin, is_repaired=is_repaired)


def check_keys(names: Iterable[str], source: SourceSettings, field: str, origin: Origin) -> None:
    """Refuse ``names`` with neither the text's nor the messages' key, and say the nearest one."""
    present = list(names)
    if source.text_key in present or source.messages_key in present:
        return
    listed = ", ".join(repr(name) for name in present[:10]) or "none"
    nearest = difflib.get_close_matches(source.text_key, present, n=1)
    raise ConfigError(
        f"{field}.text_key",
        source.text_key,
        f"{origin} has neither this key nor {source.messages_key!r}; its keys: {listed}",
        f"Set text_key to {nearest[0]!r}"
        if nearest
        else "Set text_key to the key that holds the text, or messages_key to that of the chats",
    )
