"""The signals that tell a process to end: SIGTERM, and SIGHUP of a terminal that closes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


@contextmanager
def when_told_to_end(leave: Callable[[signal.Signals], NoReturn]) -> Iterator[None]:
    """Inside this block call ``leave``, which raises, in the main thread at either signal.

    A SIGHUP that is ignored stays so: that is how ``nohup`` keeps a command running. After the
    first one all others are: the shell sends one when its terminal closes, the kernel another when
    the shell ends, and neither asks for more haste. In other threads the block changes nothing, as
    only the main thread gets signals.
    """

    def on_signal(number: int, frame: FrameType | None) -> NoReturn:
        if number == signal.SIGHUP:
            signal.signal(number, signal.SIG_IGN)
        leave(signal.Signals(number))

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, handler)
