"""What differs between the two endpoints."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic

from shoal.inference.params import SamplingParams
from shoal_deployments.openai.validation import BodyT
from shoal_deployments.openai.writer import Header, Writer
from shoal_deployments.tokenizing import Tokenizing


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptTokens:
    """One prompt, tokenized."""

    ids: tuple[int, ...]

    text: str | None = None
    """Its text, where the client sent text and the answer may repeat it."""


class Endpoint(ABC, Generic[BodyT]):
    """One path: its body, and how a checked body becomes prompts, parameters and an answer."""

    body_type: ClassVar[type]
    id_prefix: ClassVar[str]

    @abstractmethod
    def params(self, body: BodyT) -> SamplingParams:
        """Sampling parameters; ConfigError where fields contradict each other."""

    @abstractmethod
    def field_names(self, body: BodyT) -> Mapping[str, str]:
        """What a refusal calls the engine's fields that the client knows by other names."""

    @abstractmethod
    async def prompts(self, body: BodyT, tokenizing: Tokenizing) -> list[PromptTokens]:
        """The prompts as tokens; ConfigError or ApiError where there is no way to make them."""

    @abstractmethod
    async def writer(
        self,
        header: Header,
        body: BodyT,
        prompts: Sequence[PromptTokens],
        tokenizing: Tokenizing,
    ) -> Writer:
        """What writes the answer to ``body``."""
