"""Commands of the demo: printed, so that each can be repeated by hand, and over when it is."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

GRACE_S = 60.0
"""What a command may take to put things in order once it is told to end."""

READY = re.compile(r"Ready at (http\S+)/v1")

SHOAL = [sys.executable, "-m", "shoal"]


def run(command: Sequence[str], folder: Path) -> None:
    """Run ``command`` in ``folder``; CalledProcessError unless its exit code is 0."""
    with _started(command, folder) as process:
        code = process.wait()
    if code != 0:
        raise subprocess.CalledProcessError(code, command)


@contextmanager
def server(command: Sequence[str], folder: Path) -> Iterator[str]:
    """Run ``shoal serve`` until the end of the block; gives its address once it answers there."""
    with _started(command, folder, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            found = READY.search(line)
            if found is not None:
                break
        else:
            raise subprocess.CalledProcessError(process.wait() or 1, command)
        # It must never wait for somebody to read what else it has to say.
        threading.Thread(
            target=shutil.copyfileobj, args=(process.stdout, sys.stdout), daemon=True
        ).start()
        yield found[1]


@contextmanager
def _started(
    command: Sequence[str], folder: Path, stdout: int | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A process that is over with the block, however that ends."""
    print(f"\n$ {_shown(command)}", flush=True)
    process = subprocess.Popen(command, cwd=folder, stdout=stdout, text=True)
    try:
        yield process
    except KeyboardInterrupt:
        # Ctrl-C reached the command as well; a second signal would disturb its putting away.
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
        raise
    finally:
        _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _shown(command: Sequence[str]) -> str:
    """The command as a person would write it in the environment of this one."""
    if list(command[:3]) == SHOAL:
        return shlex.join(("shoal", *command[3:]))
    return shlex.join("python" if part == sys.executable else part for part in command)
