"""What an answer looks like: the part that both endpoints share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from shoal_deployments.openai.answers import Answers, Choice


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """What every object of one answer repeats."""

    id: str

    created: int
    """Seconds since 1970."""

    model: str

    system_fingerprint: str | None
    """Of the kernels that compute the answer; None where nothing was proven of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """What is sent for an addition to a choice."""

    choice: Choice

    content: dict[str, Any] | None
    """None where there is nothing to send."""


class Writer(ABC):
    """Turns choices into the JSON objects of one endpoint.

    A chunk has one choice; where usage is asked for, all chunks but the last have a null in its
    place, as in OpenAI's API.
    """

    kind: ClassVar[str]
    """``object`` of a whole answer."""

    chunk_kind: ClassVar[str]
    """``object`` of a chunk."""

    def __init__(self, header: Header, *, includes_usage: bool) -> None:
        self._header = header
        self._includes_usage = includes_usage

    @abstractmethod
    def opening(self, choices: Sequence[Choice]) -> list[Chunk]:
        """Chunks of a stream before the first token of ``choices``, which are empty."""

    @abstractmethod
    def chunks(self, added: Sequence[Choice]) -> list[Chunk]:
        """Chunks of a stream for what was added to some choices; some may come only later."""

    @abstractmethod
    def whole(self, choices: Sequence[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        """The answer at once; ``choices`` are complete and in order."""

    def closing(self, usage: dict[str, Any]) -> list[dict[str, Any]]:
        """Chunks of a stream after the last token."""
        if not self._includes_usage:
            return []
        return [self._object(self.chunk_kind, []) | {"usage": usage}]

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = self._object(self.chunk_kind, [choice])
        if self._includes_usage:
            chunk["usage"] = None
        return chunk

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        header = self._header
        return {
            "id": header.id,
            "object": kind,
            "created": header.created,
            "model": header.model,
            "system_fingerprint": header.system_fingerprint,
            "choices": choices,
        }


def ending_of(choice: Choice) -> dict[str, Any]:
    """What a choice says of its end beside ``finish_reason``, each only where there is such."""
    words = {
        "stop_reason": choice.stop_reason,
        "durable": choice.durable,
        "durable_problem": choice.durable_problem,
    }
    return {name: value for name, value in words.items() if value is not None}


def usage_of(answers: Answers) -> dict[str, Any]:
    """Tokens that were used: the same streamed and not, over all prompts and choices."""
    prompt, generated = answers.num_prompt, answers.num_generated
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": answers.num_cached},
    }
