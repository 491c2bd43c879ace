"""What every request to one frontend shares."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from shoal.config import JournalSettings, LimitSettings
from shoal_deployments.engine_client import EngineClient
from shoal_deployments.metrics import Metrics
from shoal_deployments.openai.errors import try_later
from shoal_deployments.tokenizing import Tokenizing


class Admission:
    """Counts the requests that a frontend holds and turns away what is too much."""

    def __init__(self, limits: LimitSettings) -> None:
        self._limits = limits
        self.num_held = 0

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Hold one request; ApiError, status 429, where there is no room."""
        if self.num_held >= self._limits.requests:
            message = f"The server is answering {self.num_held} requests, as many as it takes."
            raise try_later(429, message, "too_many_requests", self._limits.retry_after_s)
        self.num_held += 1
        try:
            yield
        finally:
            self.num_held -= 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Service:
    """The engines, the tokenizer and the books of one frontend."""

    engine: EngineClient
    tokenizing: Tokenizing
    limits: LimitSettings
    journal: JournalSettings
    admission: Admission
    metrics: Metrics
