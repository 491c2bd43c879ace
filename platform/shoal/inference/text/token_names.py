"""What a token is called where it stands by itself, such as among the likeliest of a step."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.data import Tokenizer
from shoal.inference.text.detokenizer import TokenTexts


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenName:
    """One token by itself."""

    text: str
    """Its text; a special token's own name; ``token_id:195`` for one that is no whole text."""

    data: bytes | None
    """The bytes that it is; None for one that is no text, or whose bytes nobody knows."""


class TokenNames:
    """The names of a tokenizer's tokens, whose texts are ``texts``."""

    def __init__(self, tokenizer: Tokenizer, texts: TokenTexts) -> None:
        self._tokenizer = tokenizer
        self._texts = texts
        self._names: dict[int, TokenName] = {}

    def of(self, token: int) -> TokenName:
        """Name of ``token``."""
        name = self._names.get(token)
        if name is None:
            name = self._names[token] = self._find(token)
        return name

    def piece(self, token: int) -> str:
        """What ``token`` adds to a text: nothing, if it is a special one."""
        return self._texts.one(token)

    def _find(self, token: int) -> TokenName:
        special = self._tokenizer.special_text(token)
        if special is not None:
            return TokenName(text=special, data=None)
        text, data = self._texts.one(token), self._tokenizer.token_bytes(token)
        if data is None and text and "\ufffd" not in text:
            data = text.encode()
        is_text = text != "" and text.encode() == data
        return TokenName(text=text if is_text else by_id(token), data=data)


def by_id(token: int) -> str:
    """The name of a token that has none of its own."""
    return f"token_id:{token}"
