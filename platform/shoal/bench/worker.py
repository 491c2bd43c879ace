"""A process that answers one line of JSON with another.

    driver                                worker
       │ <────────────────────── @"ready" ──│   all that it needs is loaded
       │── {"prompts": [[…]], …} ──────────>│
       │ <─────────────────────── @<JSON> ──│   and again, until the input ends

Lines without the mark are its log.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from shoal.errors import WorkError

MARK = "@"
"""``engine_vllm`` and the client of ``shoal bench serve``, which do without Shoal, have theirs."""
_TAIL = 20
"""Lines of a log that an error shows."""


class Worker:
    """The driver's end of one such process."""

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
def worker(
    name: str, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[Worker]:
    """Start one, which first says that it is ready; at the end of the block it is killed.

    ``environment`` is laid over this process's own.
    """
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            process_group=0,
            env=os.environ | (environment or {}),
        ) as process,
    ):
        try:
            started = Worker(name, process, log)
            started.answer()
            yield started
        finally:
            # vLLM computes in processes of its own, which would outlive the one that we started.
            os.killpg(process.pid, signal.SIGKILL)
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.close()  # it may hold what one that has ended was asked


def say(answer: object) -> None:
    """Tell the driver, in a worker."""
    sys.stdout.write(f"{MARK}{json.dumps(answer)}\n")
    sys.stdout.flush()


def tail(log: Path) -> str:
    """The end of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL:])
