"""A tokenizer of 257 entries that needs no file: the 256 bytes and end-of-text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shoal.data.tokenizer.interface import ChatTokens, Message, check_messages, well_formed
from shoal.errors import ConfigError

END_OF_TEXT = 256


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, end-of-text as 256.

    A chat reads ``<|user|>\\nHi\\n<|assistant|>\\nHello`` and end-of-text closes each of the
    assistant's turns, so that a model that has learned to answer also stops.
    """

    name = "bytes"
    vocab_size = 257
    end_of_text = END_OF_TEXT
    fingerprint = "bytes-1"
    has_chat_template = True

    def encode(self, text: str) -> list[int]:
        """Bytes of ``text``."""
        return list(well_formed(text).encode())

    def encode_prompt(self, text: str) -> list[int]:
        """The same: no byte is special."""
        return self.encode(text)

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of ``tokens``; ValueError for an id that is not in the vocabulary."""
        ids = list(tokens)
        outside = [token for token in ids if not 0 <= token <= END_OF_TEXT]
        if outside:
            raise ValueError(f"token {outside[0]} is outside the vocabulary of {self.vocab_size}")
        return bytes(token for token in ids if token != END_OF_TEXT).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes | None:
        """The byte itself."""
        return bytes([token]) if 0 <= token < END_OF_TEXT else None

    def special_text(self, token: int) -> str | None:
        """A name for end-of-text, the one that others give theirs."""
        return "<|endoftext|>" if token == END_OF_TEXT else None

    def encode_document(self, text: str) -> list[int]:
        """Bytes of ``text`` and end-of-text."""
        return [*self.encode(text), END_OF_TEXT]

    def encode_chat(self, messages: Sequence[Message]) -> ChatTokens:
        """One chat in the form above; ConfigError where a message has no text."""
        tokens: list[int] = []
        is_label: list[bool] = []
        for number, message in enumerate(check_messages(messages), 1):
            content = message.get("content")
            if not isinstance(content, str):
                raise ConfigError(
                    "messages",
                    message,
                    f"the content of message {number} is not text",
                    "Give text, or a tokenizer whose chat template takes such content",
                )
            speaks = message["role"] == "assistant"
            header = self._header(message["role"], is_first=number == 1)
            words = self.encode(content) + ([END_OF_TEXT] if speaks else [])
            tokens += header + words
            is_label += [False] * len(header) + [speaks] * len(words)
        if tokens[-1] != END_OF_TEXT:
            tokens.append(END_OF_TEXT)
            is_label.append(False)
        return ChatTokens(tokens=tokens, is_label=is_label)

    def apply_chat_template(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a chat up to where the assistant speaks next."""
        chat = self.encode_chat(messages).tokens
        if messages[-1]["role"] != "assistant":
            chat.pop()  # end-of-text stands for an end that this chat has not reached
        return chat + self._header("assistant", is_first=False)

    def _header(self, role: str, *, is_first: bool) -> list[int]:
        return self.encode(f"{'' if is_first else chr(10)}<|{role}|>\n")
