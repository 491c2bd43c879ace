"""A tokenizer that a test holds up in the middle of a long text."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from shoal.data.tokenizer import ByteTokenizer, Message
from shoal_deployments.tokenizing import INLINE_CHARACTERS
from tests.deployments.server import DEADLINE_S


class GatedTokenizer(ByteTokenizer):
    """Works on long texts only once it may."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.has_begun = threading.Event()
        self.may_go_on = threading.Event()

    def encode_prompt(self, text: str) -> list[int]:
        self._wait(text)
        return super().encode_prompt(text)

    def apply_chat_template(self, messages: Sequence[Message]) -> list[int]:
        self._wait(messages[0]["content"])
        return super().apply_chat_template(messages)

    def _wait(self, text: str) -> None:
        if len(text) > INLINE_CHARACTERS:
            self.begun.append(text)
            self.has_begun.set()
            assert self.may_go_on.wait(DEADLINE_S)
