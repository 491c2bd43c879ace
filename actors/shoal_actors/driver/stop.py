"""SIGTERM as an exception of the main thread, so that a run is put in order as at a Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Terminated(KeyboardInterrupt):
    """The process was told to end; no ``except Exception`` stops it.

    A KeyboardInterrupt, since Ray's waiting lets through no other exception of a signal handler.
    """


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Raise Terminated in the main thread at SIGTERM, inside this block."""
    is_told = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal is_told
        is_told = True
        raise Terminated

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers, and gets signals
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt as error:
        if is_told and not isinstance(error, Terminated):
            raise Terminated from error  # what Ray's waiting made of ours
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
