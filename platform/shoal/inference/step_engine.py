"""What those who run an engine ask of it."""

from __future__ import annotations

from typing import Protocol

from shoal.inference.protocol import Output, Stats
from shoal.inference.request import Request


class StepEngine(Protocol):
    """What is asked of an engine, always by one thread."""

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has something to do."""
        ...

    def add(self, request: Request) -> bool:
        """Queue a request, or refuse it with a ShoalError; False if it was aborted before."""
        ...

    def abort(self, request_id: str) -> int:
        """End a request in any state; an unknown id is kept in mind."""
        ...

    def step(self) -> list[Output]:
        """Compute one step."""
        ...

    def stats(self) -> Stats:
        """Sizes and counters."""
        ...
