"""Being told to end as an exception of the main thread: a run is put in order as at a Ctrl-C."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from shoal.endings import when_told_to_end


class Terminated(KeyboardInterrupt):
    """The process was told to end; no ``except Exception`` stops it.

    A KeyboardInterrupt, since Ray's waiting lets through no other exception of a signal handler.
    """

    def __init__(self, signal_name: str) -> None:
        """``signal_name`` is SIGTERM, or SIGHUP where the terminal was closed."""
        super().__init__(signal_name)
        self.signal_name = signal_name


@contextmanager
def termination_raises() -> Iterator[None]:
    """Inside this block raise Terminated in the main thread at SIGTERM and SIGHUP."""
    told_by: list[str] = []

    def stop(number: signal.Signals) -> NoReturn:
        told_by.append(number.name)
        raise Terminated(number.name)

    try:
        with when_told_to_end(stop):
            yield
    except KeyboardInterrupt as error:
        if told_by and not isinstance(error, Terminated):
            raise Terminated(told_by[0]) from error  # what Ray's waiting made of ours
        raise


@contextmanager
def hangups_withheld() -> Iterator[None]:
    """Inside this block SIGHUP waits, and for processes begun here it waits for ever.

    A terminal that closes tells every process of its group. Those that the driver ends, in order,
    have to be there until then.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
