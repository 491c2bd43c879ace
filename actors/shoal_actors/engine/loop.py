"""An engine's loop, in a thread of its own, so that no other work ever waits for a step.

any thread                       the engine's thread
   │── submit(...) ── Future ──────> │  between two steps: add, all or none
   │── abort(ids) ─────────────────> │  between two steps
   │ <── deliver({frontend: outputs})│  after each step, one list for each frontend
   │ <── ended(error) ───────────────│  once, if the loop fails: nothing more comes
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future

from shoal.errors import ShoalError, WorkError
from shoal.inference.protocol import Output, Stats, Submission
from shoal.inference.step_engine import StepEngine

logger = logging.getLogger(__name__)

Deliver = Callable[[Mapping[str, list[Output]]], None]


class EngineLoop:
    """Runs ``engine``; ``deliver`` and ``ended`` are called in its thread and must not wait."""

    def __init__(
        self,
        engine: StepEngine,
        deliver: Deliver,
        ended: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``clock`` says how long a turn takes."""
        self._engine = engine
        self._clock = clock
        self._deliver = deliver
        self._ended = ended
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._owners: dict[str, tuple[str, int]] = {}  # frontend and choices under way, by request
        self._stats = engine.stats()
        self._turn_began: float | None = None
        self._is_stopping = False
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin to take requests."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """End after the step under way; what is unfinished is given up."""
        self._commands.put(self._stop)
        self._thread.join(timeout_s)

    @property
    def stats(self) -> Stats:
        """The engine after its last step or command."""
        return self._stats

    @property
    def busy_s(self) -> float:
        """How long the turn under way, its commands and its step, has taken; 0 without work."""
        began = self._turn_began
        return 0.0 if began is None else self._clock() - began

    def submit(self, submissions: Sequence[Submission]) -> Future[None]:
        """Add all of ``submissions``, or none and raise why: ConfigError, Overloaded."""
        taken: Future[None] = Future()
        self._commands.put(lambda: self._submit(submissions, taken))
        return taken

    def abort(self, request_ids: Iterable[str]) -> None:
        """Give up requests in any state; ids that are still to come are kept in mind."""
        ids = tuple(request_ids)
        self._commands.put(lambda: self._abort(ids))

    def drop(self, frontend: str) -> None:
        """Give up all requests of ``frontend``."""
        self._commands.put(lambda: self._drop(frontend))

    def wake(self) -> None:
        """Have the engine asked again whether it has work; any thread may call it."""
        self._commands.put(_nothing)

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._turn()
            self._turn_began = None
        # The edge of the thread. The engine contains what goes wrong in a step or a request, so
        # its books may be wrong now: whoever owns the process starts another.
        except Exception as error:
            logger.exception("the engine's loop failed")
            self._failure = f"The engine failed: {type(error).__name__}: {error}"
            self._turn_began = None
            self._ended(self._failure)
            while not self._is_stopping:
                self._commands.get()()

    def _turn(self) -> None:
        """Take the commands that wait, or wait for one; then one step if there is work."""
        waits = not self._engine.has_work
        self._turn_began = None if waits else self._clock()
        while True:
            try:
                command = self._commands.get(block=waits)
            except queue.Empty:
                break
            if waits:
                self._turn_began = self._clock()
            command()
            waits = False
        if self._engine.has_work and not self._is_stopping:
            self._hand_out(self._engine.step())
        self._stats = self._engine.stats()

    def _hand_out(self, outputs: Iterable[Output]) -> None:
        by_frontend: dict[str, list[Output]] = {}
        for output in outputs:
            frontend, missing = self._owners[output.request_id]
            by_frontend.setdefault(frontend, []).append(output)
            if output.finish_reason is not None:
                if missing == 1:
                    del self._owners[output.request_id]
                else:
                    self._owners[output.request_id] = (frontend, missing - 1)
        if by_frontend:
            self._deliver(by_frontend)

    def _submit(self, submissions: Sequence[Submission], taken: Future[None]) -> None:
        if self._failure is not None:
            _resolve(taken, WorkError(self._failure))
            return
        added: list[str] = []
        for submission in submissions:
            request = submission.request
            try:
                is_under_way = self._engine.add(request)
            except ShoalError as error:
                self._abort(added)
                _resolve(taken, error)
                return
            if is_under_way:
                self._owners[request.id] = (submission.frontend, request.params.n)
                added.append(request.id)
        _resolve(taken, None)

    def _abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if self._failure is None:
                self._engine.abort(request_id)
            self._owners.pop(request_id, None)

    def _drop(self, frontend: str) -> None:
        self._abort([each for each, (owner, _) in self._owners.items() if owner == frontend])

    def _stop(self) -> None:
        self._is_stopping = True


def _nothing() -> None:
    """A command that only ends the wait for one."""


def _resolve(future: Future[None], error: ShoalError | None) -> None:
    """Give ``future`` its result, unless whoever waited has left."""
    if not future.set_running_or_notify_cancel():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
