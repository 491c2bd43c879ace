"""SIGTERM as an exception of the main thread, so that a run is put in order as at a Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Terminated(BaseException):
    """The process was told to end. Like KeyboardInterrupt, no ``except Exception`` stops it."""


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Raise Terminated in the main thread at SIGTERM, inside this block."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Terminated

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers, and gets signals
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
