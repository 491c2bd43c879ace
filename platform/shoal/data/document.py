"""One document of a source, before it is tokenized."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Where a document stands; its text is for messages."""

    path: str

    offset: int | None = None
    """Byte at which its line of JSONL starts."""

    row: int | None = None
    """Its row in a Parquet file, from 0."""

    def __str__(self) -> str:
        if self.row is not None:
            return f"{self.path} row {self.row}"
        if self.offset is not None:
            # Counted only here: a reader that starts inside a file does not know the number.
            with Path(self.path).open("rb") as stream:
                lines_before = stream.read(self.offset).count(b"\n")
            return f"{self.path} line {lines_before + 1}"
        return self.path


@dataclass(frozen=True, kw_only=True, slots=True)
class TextDocument:
    """A text, all of it to learn."""

    text: str
    origin: Origin

    is_repaired: bool = False
    """Whether bytes that are not UTF-8 were replaced by U+FFFD."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatDocument:
    """A chat, of which the assistant's words are to learn."""

    messages: list[dict[str, Any]]
    origin: Origin

    is_repaired: bool = False
    """Whether bytes that are not UTF-8 were replaced by U+FFFD."""


Document: TypeAlias = TextDocument | ChatDocument
