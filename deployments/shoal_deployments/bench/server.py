"""``shoal serve`` as users start it, for as long as it is measured."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from shoal.bench.worker import tail
from shoal.errors import WorkError

_START_S = 300.0
_STOP_S = 120.0
_POLL_S = 0.2
_READY = re.compile(r"Ready at http://(\S+)/v1")


@contextmanager
def serving(
    folder: Path, overrides: Sequence[str], environment: Mapping[str, str], log: Path
) -> Iterator[str]:
    """Serve the model in ``folder`` and yield ``host:port``; WorkError where it does not start."""
    command = [sys.executable, "-m", "shoal", "serve", str(folder)]
    for override in (*overrides, "serve.port=0"):
        command += ["--set", override]
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            env=os.environ | environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            # An interrupt at the terminal is for us; we pass it on.
            start_new_session=True,
        )
    try:
        yield _address(process, log)
    finally:
        _stop(process)


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + _START_S
    while (address := address_in(log.read_text(errors="replace"))) is None:
        if process.poll() is not None:
            raise WorkError(f"shoal serve ended:\n{tail(log)}")
        if time.monotonic() > deadline:
            raise WorkError(f"shoal serve was not ready in {_START_S:g} s:\n{tail(log)}")
        time.sleep(_POLL_S)
    return address


def address_in(log: str) -> str | None:
    """``host:port`` of a server that has said in its ``log`` that it is ready."""
    found = _READY.search(log)
    return None if found is None else found[1]


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
