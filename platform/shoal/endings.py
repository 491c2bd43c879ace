"""The signals that tell a process to end: SIGTERM, and SIGHUP of a terminal that closes."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

AGAIN_S = 0.05
"""Seconds until ``leave`` is called again where what it raised was lost."""


@contextmanager
def when_told_to_end(leave: Callable[[signal.Signals], NoReturn]) -> Iterator[None]:
    """Inside this block call ``leave``, which raises, in the main thread at either signal.

    A SIGHUP that is ignored stays so: that is how ``nohup`` keeps a command running. After the
    first one all others are: the shell sends one when its terminal closes, the kernel another when
    the shell ends, and neither asks for more haste. In other threads the block changes nothing, as
    only the main thread gets signals.

    A signal may come while Python runs a finalizer, or a callback that nothing can be raised from.
    What ``leave`` raises there is lost, so it is called once more, as at the first signal.
    """
    raised: list[BaseException] = []
    first: list[signal.Signals] = []

    def on_signal(number: int, frame: FrameType | None) -> NoReturn:
        if number == signal.SIGHUP:
            signal.signal(number, signal.SIG_IGN)
        first.append(signal.Signals(number))
        try:
            leave(first[0])
        except BaseException as error:
            raised.append(error)
            raise

    def on_unraisable(lost: Any) -> None:
        if any(lost.exc_value is error for error in raised):
            # From another thread: here, it would be lost again.
            threading.Timer(AGAIN_S, os.kill, (os.getpid(), signal.SIGTERM)).start()
        else:
            others(lost)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, on_signal) for number in numbers}
    others, sys.unraisablehook = sys.unraisablehook, on_unraisable
    try:
        yield
    finally:
        sys.unraisablehook = others
        for number, handler in before.items():
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, handler)
