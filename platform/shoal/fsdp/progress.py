"""What this process still has to do for its peers, on all axes, while it waits for one of them.

Ranks wait for different axes at the same time. If a rank that waits on one axis left a step on
another axis undone until it comes to wait there, ranks could wait for each other in a circle:

    A waits for B on axis 1 ── B waits for A's step on axis 2 ── A would take it after its wait

So whoever waits takes what steps have become possible, on every axis of the process. A collective
that other code makes meanwhile, such as a barrier, is safe once every deed was waited for.
"""

from __future__ import annotations

import threading
import weakref
from typing import Protocol


class Owing(Protocol):
    """Something with steps that peers may be waiting for."""

    def advance(self) -> bool:
        """Take what steps are possible without waiting; whether some are left."""


class _Thread(threading.local):
    # A thread drives what it made. It has one set of that, so this is state of the process.
    def __init__(self) -> None:
        self.owing: weakref.WeakSet[Owing] = weakref.WeakSet()


_thread = _Thread()


def register(owing: Owing) -> None:
    """Have ``owing`` advanced during every wait of this thread, while it lives."""
    _thread.owing.add(owing)


def advance_all(*, but: Owing | None = None) -> bool:
    """Advance everything, or everything else; whether steps are left there."""
    left = [owing.advance() for owing in list(_thread.owing) if owing is not but]
    return any(left)
