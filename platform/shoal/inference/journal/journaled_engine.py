"""An engine whose requests and tokens are journaled, with the same methods as the engine itself."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from shoal.inference.journal.journal import Journal
from shoal.inference.journal.records import Grew
from shoal.inference.protocol import Output, Stats
from shoal.inference.request import Request
from shoal.inference.step_engine import StepEngine


@dataclass(eq=False, kw_only=True, slots=True)
class _UnderWay:
    """A request that has choices without an end."""

    is_durable: bool
    is_left_out: bool
    """Whether something of it found no room: then the rest is left out too, so that what the
    journal has of a choice is its beginning."""
    sizes: dict[int, int] = field(default_factory=dict)
    """Tokens of each choice that has not ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Held:
    """The last output of a choice, which waits until its tokens are on the disk."""

    output: Output
    batch: int
    deadline: float


class JournaledEngine:
    """``engine``, with all that it takes and gives written to ``journal``.

    The last output of each choice of a ``durable`` request is held until the choice's tokens are on
    the disk, at most for ``serve.journal.ack_timeout_s``; everything else passes at once. So there
    may be work for ``step`` while the engine has none.
    """

    def __init__(
        self, engine: StepEngine, journal: Journal, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine = engine
        self._journal = journal
        self._clock = clock
        self._under_way: dict[str, _UnderWay] = {}
        self._held: deque[_Held] = deque()
        """In the order in which they came, which is that of their batches and deadlines."""

    @property
    def has_work(self) -> bool:
        """Whether the engine has a step to compute, or an output is held no more."""
        return self._engine.has_work or self._is_due

    def add(self, request: Request) -> bool:
        """As the engine; JournalFull where the journal has no room and may leave nothing out."""
        self._journal.check_room()
        if not self._engine.add(request):
            return False
        self._under_way[request.id] = _UnderWay(
            is_durable=request.durable,
            is_left_out=self._journal.begin(request) is None,
            sizes=dict.fromkeys(range(request.params.n), 0),
        )
        return True

    def abort(self, request_id: str) -> int:
        """As the engine; an output that is held is given up."""
        count = self._engine.abort(request_id)
        under_way = self._under_way.pop(request_id, None)
        if under_way is not None and not under_way.is_left_out:
            for choice, size in under_way.sizes.items():
                self._journal.grow(
                    Grew(
                        request_id=request_id,
                        choice=choice,
                        position=size,
                        token_ids=(),
                        finish_reason="abort",
                    )
                )
        if any(held.output.request_id == request_id for held in self._held):
            kept = [held for held in self._held if held.output.request_id != request_id]
            self._held = deque(kept)
        return count

    def step(self) -> list[Output]:
        """What the engine's next step gives, without what is held, and what is held no more."""
        outputs = self._engine.step() if self._engine.has_work else []
        passed = [output for output in map(self._journaled, outputs) if output is not None]
        while self._is_due:
            passed.append(self._released(self._held.popleft()))
        return passed

    def stats(self) -> Stats:
        """As the engine."""
        return self._engine.stats()

    @property
    def _is_due(self) -> bool:
        if not self._held:
            return False
        first = self._held[0]
        return first.batch <= self._journal.stored or first.deadline <= self._clock()

    def _journaled(self, output: Output) -> Output | None:
        """``output`` as it may pass now; None where it is held."""
        under_way = self._under_way[output.request_id]
        batch = self._note(under_way, output)
        if output.finish_reason is None:
            return output
        del under_way.sizes[output.choice]
        if not under_way.sizes:
            del self._under_way[output.request_id]
        if not under_way.is_durable or output.finish_reason == "error":
            return output
        if batch is None:
            problem = "The journal's queue was full, and tokens were left out."
            return replace(output, durable=False, durable_problem=problem)
        deadline = self._clock() + self._journal.settings.ack_timeout_s
        self._held.append(_Held(output=output, batch=batch, deadline=deadline))
        return None

    def _note(self, under_way: _UnderWay, output: Output) -> int | None:
        """Write ``output`` down; the batch that has it, None where it is left out."""
        size = under_way.sizes[output.choice]
        under_way.sizes[output.choice] += len(output.token_ids)
        if under_way.is_left_out:
            self._journal.leave_out(len(output.token_ids))
            return None
        batch = self._journal.grow(
            Grew(
                request_id=output.request_id,
                choice=output.choice,
                position=size,
                token_ids=output.token_ids,
                finish_reason=output.finish_reason,
            )
        )
        under_way.is_left_out = batch is None
        return batch

    def _released(self, held: _Held) -> Output:
        if held.batch <= self._journal.stored:
            return replace(held.output, durable=True)
        problem = f"It took longer than {self._journal.settings.ack_timeout_s:g} seconds."
        if self._journal.failure:
            problem += f" The journal's disk fails: {self._journal.failure}."
        return replace(held.output, durable=False, durable_problem=problem)
