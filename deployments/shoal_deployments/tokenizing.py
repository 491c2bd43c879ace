"""Text to tokens and back without holding up the streams of others.

A short text is worked on at once: that takes less than handing it over. A long one goes to a
thread, where the tokenizer lets go of the interpreter. What nobody waits for any more is taken
out of the queue; what a thread has begun, it ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from shoal.data.tokenizer import Message, Tokenizer
from shoal.inference.text import TokenNames, TokenTexts

A = TypeVar("A")
T = TypeVar("T")

INLINE_CHARACTERS = 4096
"""Longest text that is worked on at once: about 2 ms."""

_CHARACTERS_PER_TOKEN = 4
_CHARACTERS_PER_MESSAGE = 32
"""A template takes as long for a message as the tokenizer for so many."""


class Tokenizing:
    """A tokenizer with threads of its own; ``close`` ends them."""

    def __init__(self, tokenizer: Tokenizer, num_threads: int = 1) -> None:
        self._tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenize")
        self._texts = TokenTexts(tokenizer)
        self.names = TokenNames(tokenizer, self._texts)
        """What tokens are called where they stand by themselves."""

    @property
    def has_chat_template(self) -> bool:
        """Whether the model can be sent chats."""
        return self._tokenizer.has_chat_template

    async def encode(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Ids of each of ``texts``, with the tokenizer's own start token if it has one."""
        return await self.run(sum(map(len, texts)), self._encode, texts)

    async def encode_chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Ids of a chat up to the assistant's turn; ConfigError where its template refuses."""
        length = sum(len(message["content"]) + _CHARACTERS_PER_MESSAGE for message in messages)
        template = self._tokenizer.apply_chat_template
        return tuple(await self.run(length, template, messages))

    async def decode(self, tokens: Sequence[int]) -> str:
        """Text of ``tokens``."""
        length = len(tokens) * _CHARACTERS_PER_TOKEN
        return await self.run(length, self._texts.whole, tokens)

    def close(self) -> None:
        """End the threads as soon as they have ended what they are at."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def run(self, length: int, work: Callable[[A], T], argument: A) -> T:
        """``work(argument)``, which takes as long as tokenizing ``length`` characters."""
        if length <= INLINE_CHARACTERS:
            return work(argument)
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, argument)

    def _encode(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        return [tuple(self._tokenizer.encode_prompt(text)) for text in texts]
