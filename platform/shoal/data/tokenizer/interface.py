"""What the rest of the house may expect of a tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from shoal.errors import ConfigError

Message: TypeAlias = Mapping[str, Any]
"""One turn of a chat: ``role`` and, for most templates, ``content``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatTokens:
    """One chat as tokens, and which of them the model shall learn to say."""

    tokens: list[int]
    """Token ids, end-of-text included."""

    is_label: list[bool]
    """True where the token is the assistant's, its end marker included; as long as ``tokens``."""


class Tokenizer(Protocol):
    """Text to token ids and back. Pickles, so that it can travel to the tasks that tokenize."""

    @property
    def name(self) -> str:
        """What the user called it: ``bytes`` or a folder."""
        ...

    @property
    def vocab_size(self) -> int:
        """Largest token id plus one."""
        ...

    @property
    def end_of_text(self) -> int:
        """The id that ends every document."""
        ...

    @property
    def fingerprint(self) -> str:
        """Equal for two tokenizers only if they give the same tokens for every text and chat."""
        ...

    @property
    def has_chat_template(self) -> bool:
        """Whether chats can be tokenized; without one, ConfigError says that it is missing."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of ``text`` alone; a special token spelled out in it becomes that token."""
        ...

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a text to go on from, with what the tokenizer itself puts around a text.

        That is a start token for many families. A chat's template writes its own.
        """
        ...

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of ``tokens``, special tokens left out, damaged UTF-8 as U+FFFD."""
        ...

    def token_bytes(self, token: int) -> bytes | None:
        """The bytes that ``token`` stands for, which need be no whole characters.

        None for a special token, for one outside the vocabulary, and where the vocabulary holds
        text: then the token is what ``decode`` writes.
        """
        ...

    def special_text(self, token: int) -> str | None:
        """What a special token, which ``decode`` leaves out, is called; None for all others."""
        ...

    def encode_document(self, text: str) -> list[int]:
        """Ids of one whole document, end-of-text included."""
        ...

    def encode_chat(self, messages: Sequence[Message]) -> ChatTokens:
        """One whole chat; ConfigError on field ``messages`` if the template cannot render it."""
        ...

    def apply_chat_template(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a chat up to where the assistant speaks next; ConfigError as above."""
        ...


def check_messages(messages: object) -> list[dict[str, Any]]:
    """Give ``messages`` as plain dicts without null values, or refuse with what is wrong."""
    remedy = "Give a list of objects, each with a text 'role'"
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ConfigError("messages", messages, "it is not a list of at least one message", remedy)
    plain = []
    for number, message in enumerate(messages, 1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ConfigError("messages", message, f"message {number} has no role", remedy)
        plain.append({key: value for key, value in message.items() if value is not None})
    return plain


def well_formed(text: str) -> str:
    """Give ``text`` with each lone surrogate, which UTF-8 cannot hold, replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
