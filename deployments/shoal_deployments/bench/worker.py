"""A process that answers one line of JSON with another; lines without the mark are its log."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shoal.errors import WorkError

MARK = "@"


class Worker:
    """The other end of one such process."""

    def __init__(self, name: str, process: subprocess.Popen[str], log: Path) -> None:
        self._name = name
        self._process = process
        self._log = log

    def ask(self, **question: Any) -> Any:
        """Its answer; WorkError where it has ended instead."""
        self.tell(**question)
        return self.answer()

    def tell(self, **question: Any) -> None:
        """Ask without waiting."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended; the missing answer says so

    def answer(self) -> Any:
        """What it says next; WorkError where it has ended instead."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                return json.loads(line[len(MARK) :])
        raise WorkError(f"The {self._name} ended before its answer:\n{tail(self._log)}")


@contextmanager
def worker(name: str, command: Sequence[str], log: Path) -> Iterator[Worker]:
    """Start one, which first says that it is ready; it is killed at the end of the block."""
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        try:
            started = Worker(name, process, log)
            started.answer()
            yield started
        finally:
            process.kill()


def tail(log: Path) -> str:
    """The end of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-20:])
