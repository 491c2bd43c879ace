"""SIGTERM to a rank: it makes one more step with all others, which save it, and ends.

Ray's own handler would end the process at once, and with it the attempt. A handler can only be set
in the main thread of a process, where a worker answers Ray's calls; the thread that trains finds it
by asking the system who handles the signal, so that nothing else has to be shared. A worker that is
told a second time ends as Ray has it end.
"""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

from ray.train.v2._internal.execution.callback import WorkerCallback


class Farewell:
    """A handler of SIGTERM that remembers."""

    def __init__(self, before: Any) -> None:
        """``before`` is the handler that it replaces."""
        self._before = before
        self.is_told = False
        """Whether the signal has come."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Called by Python in the main thread."""
        if self.is_told and callable(self._before):
            self._before(number, frame)
        self.is_told = True


class FarewellCallback(WorkerCallback):  # type: ignore[misc]
    """Sets the handler in each worker."""

    def after_init_train_context(self) -> None:
        """Called in the main thread, before the worker trains."""
        signal.signal(signal.SIGTERM, Farewell(signal.getsignal(signal.SIGTERM)))


def is_told() -> bool:
    """Whether this process was told to end; may be asked in any thread."""
    handler = signal.getsignal(signal.SIGTERM)
    return isinstance(handler, Farewell) and handler.is_told
