"""Commands as users start them: processes of their own, whose children can be found afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

ROOTS = [
    str(Path(__file__).resolve().parents[2] / name)
    for name in ("platform", "actors", "deployments")
]
MARK = "SHOAL_TEST_MARK"


class MarkedProcess:
    """A running command; every process under it carries a mark in its environment.

    A context manager: whatever still runs at the end of the block is killed.
    """

    def __init__(self, command: list[str], folder: Path, **environment: str) -> None:
        self.mark = uuid.uuid4().hex
        self._log = folder / f"output-{self.mark[:8]}.txt"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command,
                cwd=folder,
                env=plain_environment(**environment, **{MARK: self.mark}),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    @property
    def output(self) -> str:
        """What it has printed so far."""
        return self._log.read_text()

    def interrupt(self) -> None:
        """What a terminal does at Ctrl-C: tell the whole group."""
        os.killpg(self._process.pid, signal.SIGINT)

    def terminate(self) -> None:
        """Send SIGTERM to the command itself."""
        self._process.terminate()

    def kill(self) -> None:
        """Send SIGKILL to the command itself, which can tell nobody."""
        self._process.kill()

    def hang_up(self) -> None:
        """What a terminal does that is closed: tell the whole group."""
        os.killpg(self._process.pid, signal.SIGHUP)

    def wait(self, timeout_s: float = 240) -> int:
        """Its exit code."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"did not end in {timeout_s} s:\n{self.output}") from None

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 240) -> None:
        """Wait until something holds, while the command runs."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self._process.poll() is None, f"ended early:\n{self.output}"
            assert time.monotonic() < deadline, f"too slow:\n{self.output}"
            time.sleep(0.01)

    def left_running(self, timeout_s: float = 20) -> list[str]:
        """Command lines of processes under it that outlive it by more than ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        while (left := _marked(self.mark)) and time.monotonic() < deadline:
            time.sleep(0.2)
        return [_read(process, "cmdline").replace(b"\0", b" ").decode() for process in left]

    def kill_all(self) -> None:
        """SIGKILL to every process under it, as if its machine were gone."""
        while left := _marked(self.mark):
            for process in left:
                with suppress(ProcessLookupError):
                    os.kill(int(process.name), signal.SIGKILL)
            self._process.wait()


class ShoalProcess(MarkedProcess):
    """A running ``shoal`` command."""

    def __init__(self, arguments: list[str], folder: Path, **environment: str) -> None:
        super().__init__([sys.executable, "-m", "shoal", *arguments], folder, **environment)


def plain_environment(**more: str) -> dict[str, str]:
    """This process's environment without what earlier tests told Ray."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    path = os.pathsep.join([*ROOTS, kept.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {**kept, "PYTHONPATH": path, **more}


def _marked(mark: str) -> list[Path]:
    """The folders in ``/proc`` of all processes with a mark."""
    wanted = f"{MARK}={mark}".encode()
    return [path for path in Path("/proc").glob("[0-9]*") if wanted in _read(path, "environ")]


def _read(process: Path, name: str) -> bytes:
    try:
        return (process / name).read_bytes()
    except OSError:  # it ended meanwhile, or is another user's
        return b""
