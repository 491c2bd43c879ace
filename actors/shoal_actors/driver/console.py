"""Keeps the terminal for what Shoal has to say: everything else goes to a file.

Ray, its C++ core and the libraries under them print to the process's standard streams, from threads
and at moments of their own choosing.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console

from shoal.errors import WorkError

PACKAGES = ("shoal", "shoal_actors", "shoal_deployments")
"""Whose log the user sees."""


@contextmanager
def divert_output(log: Path) -> Iterator[Console]:
    """Send standard output and error to ``log``, and yield a console on the real output.

    Raises WorkError where ``log`` cannot be written.
    """
    with ExitStack() as stack:
        try:
            file = stack.enter_context(log.open("a", encoding="utf-8", buffering=1))
        except OSError as error:
            raise WorkError(f"{log} cannot be written: {error.strerror}.") from error
        terminal = stack.enter_context(_real_output())
        for descriptor in (1, 2):
            stack.enter_context(_replaced(descriptor, file.fileno()))
        stack.enter_context(redirect_stdout(file))
        stack.enter_context(redirect_stderr(file))
        console = Console(file=terminal)
        stack.enter_context(_logged_to(console))
        yield console


class _Output(io.FileIO):
    """A file that may be a terminal, and closed while there is still something to put in order."""

    def write(self, data: Any) -> int:
        """Write as files do; what a closed terminal does not take is dropped."""
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return len(memoryview(data))


@contextmanager
def _real_output() -> Iterator[TextIO]:
    """A stream that stays with the user's output while descriptor 1 goes elsewhere."""
    if _descriptor(sys.stdout) != 1:
        yield sys.stdout  # replaced by whoever called: it knows its own way
        return
    sys.stdout.flush()
    raw = io.BufferedWriter(_Output(os.dup(1), "w"))
    with io.TextIOWrapper(raw, encoding=sys.stdout.encoding, line_buffering=True) as stream:
        yield stream


@contextmanager
def _replaced(descriptor: int, other: int) -> Iterator[None]:
    kept = os.dup(descriptor)
    os.dup2(other, descriptor)
    try:
        yield
    finally:
        os.dup2(kept, descriptor)
        os.close(kept)


class _ConsoleHandler(logging.Handler):
    """Prints what Shoal's own packages log."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.print(self.format(record), markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _logged_to(console: Console) -> Iterator[None]:
    handler = _ConsoleHandler(console)
    loggers = [logging.getLogger(package) for package in PACKAGES]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


def _descriptor(stream: TextIO) -> int | None:
    try:
        return stream.fileno()
    except (OSError, ValueError):  # a stream in memory has none
        return None
