"""The bytes behind entries of a vocabulary, which need be no whole characters.

Two kinds of ``tokenizer.json`` have such entries: byte-level ones (GPT-2's), which write each byte
as a printable character, and those with single bytes for what has no piece (Llama 2's), ``<0xC3>``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import tokenizers

_SINGLE_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class VocabularyBytes:
    """Says of a vocabulary's entries, as ``tokenizer.json`` writes them, which bytes they are."""

    def __init__(self, encoder: tokenizers.Tokenizer) -> None:
        decoder = encoder.decoder
        kinds = set() if decoder is None else set(_kinds(json.loads(decoder.__getstate__())))
        self._is_byte_level = "ByteLevel" in kinds
        self._has_single_bytes = "ByteFallback" in kinds

    def of(self, entry: str) -> bytes | None:
        """Bytes of ``entry``; None where it is text, which only the decoder knows how to write."""
        if self._is_byte_level:
            found = [_BYTE_OF.get(character) for character in entry]
            known = [byte for byte in found if byte is not None]
            # Entries that were added to the vocabulary are written as they are.
            return bytes(known) if len(known) == len(found) else entry.encode()
        single = _SINGLE_BYTE.fullmatch(entry) if self._has_single_bytes else None
        return bytes.fromhex(single[1]) if single else None


def _kinds(decoder: Mapping[str, Any]) -> Iterator[str]:
    """The decoders of which one consists."""
    yield decoder["type"]
    for part in decoder.get("decoders", ()):
        yield from _kinds(part)


def _byte_of_characters() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes are themselves, the others the characters from 256 on."""
    printable = (*range(33, 127), *range(161, 173), *range(174, 256))
    others = [byte for byte in range(256) if byte not in printable]
    moved = {chr(256 + place): byte for place, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | moved


_BYTE_OF = _byte_of_characters()
