"""Engines with one model, and what each request is answered alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle, islice

from shoal.inference.certify.requests import Questions
from shoal.inference.certify.subject import Subject
from shoal.inference.certify.trace import Trace, run
from shoal.inference.engine import Engine
from shoal.inference.limits import Limits
from shoal.inference.request import Request
from shoal.ops.on_threads import on_threads

_COPY = "#"


class Laboratory:
    """Runs requests under any conditions; ``quick`` asks conditions for fewer cases."""

    def __init__(self, subject: Subject, *, quick: bool) -> None:
        self.subject = subject
        self.quick = quick
        self.model = subject.load_model()
        self.questions = Questions.of(self.model.config)
        self._alone: dict[str, Trace] = {}

    def engine(
        self,
        *,
        max_running: int = 64,
        max_step_tokens: int = 512,
        block_size: int | None = None,
        num_blocks: int | None = None,
    ) -> Engine:
        """A fresh engine, its cache cold, with room for everything unless told otherwise."""
        size = block_size or self.questions.block_size
        longest = max(
            len(request.prompt) + (request.params.max_tokens or 0) for request in self.questions.all
        )
        limits = Limits(
            vocab_size=self.model.config.vocab_size,
            context_length=self.model.config.max_position_embeddings,
            num_blocks=num_blocks or max_running * -(-longest // size),
            block_size=size,
            max_running=max_running,
            max_step_tokens=max_step_tokens,
        )
        return Engine(self.model, limits)

    def alone(self, request: Request) -> Trace:
        """What ``request``, or the one it is a copy of, is answered alone, on one thread."""
        name = request.id.partition(_COPY)[0]
        if name not in self._alone:
            with on_threads(1):
                found = run(self.engine(max_running=1), [(0, replace(request, id=name))])
            self._alone[name] = found[name]
        return self._alone[name]

    def company(self, size: int) -> list[Request]:
        """``size`` requests in turn, beginning elsewhere for each size; copies where need be."""
        plain = self.questions.plain
        first = size % len(plain)
        turn = islice(cycle(plain), first, first + size)
        return [
            replace(request, id=f"{request.id}{_COPY}{number}")
            for number, request in enumerate(turn)
        ]
