"""An engine without a model: each request gets tokens 0, 1, 2 ... until its ``max_tokens``."""

from __future__ import annotations

import threading
import time

from shoal.errors import ConfigError, Overloaded
from shoal.inference import Output, Request, Stats


class ScriptedEngine:
    """A ``StepEngine``; ``failure`` is raised by the next step.

    ``gate`` holds steps up, ``door`` requests.
    """

    def __init__(self, max_waiting: int = 100) -> None:
        self.failure: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.door = threading.Event()
        self.door.set()
        self.threads: set[str] = set()
        self.aborted: list[str] = []
        self._max_waiting = max_waiting
        self._left: dict[str, int] = {}
        self._dead: set[str] = set()
        self._steps = 0

    @property
    def has_work(self) -> bool:
        return bool(self._left)

    def add(self, request: Request) -> bool:
        self.threads.add(threading.current_thread().name)
        self.door.wait(30)
        if request.params.max_tokens is None:
            raise ConfigError("max_tokens", None, "unset", "Set it")
        if len(self._left) >= self._max_waiting:
            raise Overloaded("Full.")
        if request.id in self._dead:
            return False
        self._left[request.id] = request.params.max_tokens
        return True

    def abort(self, request_id: str) -> int:
        self.aborted.append(request_id)
        if self._left.pop(request_id, None) is None:
            self._dead.add(request_id)
            return 0
        return 1

    def step(self) -> list[Output]:
        self.threads.add(threading.current_thread().name)
        self.gate.wait(30)
        time.sleep(0.001)  # lets other threads in
        if self.failure is not None:
            raise self.failure
        self._steps += 1
        outputs = []
        for request_id, left in list(self._left.items()):
            reason = "length" if left == 1 else None
            outputs.append(
                Output(request_id=request_id, choice=0, token_ids=(left,), finish_reason=reason)
            )
            if left == 1:
                del self._left[request_id]
            else:
                self._left[request_id] = left - 1
        return outputs

    def stats(self) -> Stats:
        return Stats(
            running=len(self._left),
            max_running=1,
            waiting=0,
            kv_blocks_total=1,
            kv_blocks_free=1,
            kv_blocks_cached=0,
            finished=0,
            cancelled=len(self.aborted),
            failed=0,
            refused=0,
            preempted=0,
            prefix_hit_tokens=0,
            computed_tokens=0,
            generated_tokens=0,
            steps=self._steps,
        )
