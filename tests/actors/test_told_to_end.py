"""SIGTERM, and a terminal that is closed: what ends, what goes on, and what is still said."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal_actors.driver import Terminated, termination_raises
from shoal_actors.driver.stop import hangups_withheld
from tests.e2e.shoal_process import plain_environment


@pytest.fixture
def handles_hangups() -> Iterator[None]:
    """The handling of SIGHUP is put back, which after the first one stays off."""
    before = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("handles_hangups")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_being_told_is_an_exception_that_says_by_what(number: signal.Signals) -> None:
    with pytest.raises(Terminated) as told, termination_raises():
        os.kill(os.getpid(), number)
        time.sleep(10)
    assert told.value.signal_name == number.name


@pytest.mark.usefixtures("handles_hangups")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_meets_a_finalizer_is_not_lost(number: signal.Signals) -> None:
    class Dying:
        def __del__(self) -> None:
            os.kill(os.getpid(), number)
            time.sleep(0.01)

    with pytest.raises(Terminated) as told, termination_raises():
        dying = Dying()
        del dying
        time.sleep(10)
    assert told.value.signal_name == number.name


@pytest.mark.usefixtures("handles_hangups")
def test_nohup_keeps_a_command_running() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with termination_raises():
        os.kill(os.getpid(), signal.SIGHUP)


@pytest.mark.usefixtures("handles_hangups")
def test_only_the_first_hangup_counts() -> None:
    with pytest.raises(Terminated), termination_raises():
        try:
            with termination_raises():
                os.kill(os.getpid(), signal.SIGHUP)
                time.sleep(10)
        finally:
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.01)


@pytest.mark.usefixtures("handles_hangups")
def test_what_is_begun_while_hangups_are_withheld_outlives_the_terminal() -> None:
    with hangups_withheld():
        child = subprocess.Popen(["sleep", "30"])
    try:
        child.send_signal(signal.SIGHUP)
        with pytest.raises(Terminated), termination_raises():
            os.kill(os.getpid(), signal.SIGHUP)  # here it is no longer withheld
            time.sleep(10)
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()


_COMMAND = """
import os, time
from pathlib import Path
from shoal_actors.driver import Terminated, divert_output, termination_raises
os.login_tty(0)
try:
    with termination_raises(), divert_output(Path("log")) as console:
        try:
            console.print("ready")
            for _ in range(600):  # a signal just before a sleep does not cut it short
                time.sleep(0.1)
        finally:
            time.sleep(0.2)  # as long as the terminal needs to be gone
            console.print("putting things in order")
            Path("order").write_text("put")
except Terminated as told:
    Path("told").write_text(told.signal_name)
"""


def test_a_closed_terminal_does_not_disturb_the_end(tmp_path: Path) -> None:
    terminal, line = os.openpty()
    command = [sys.executable, "-c", _COMMAND]
    process = subprocess.Popen(command, stdin=line, cwd=tmp_path, env=plain_environment())
    os.close(line)
    said = b""
    while not said.endswith(b"\n"):  # a terminal may hand on a line in two parts
        said += os.read(terminal, 100)
    os.close(terminal)
    assert said == b"ready\r\n"
    assert process.wait(timeout=60) == 0
    assert (tmp_path / "told").read_text() == "SIGHUP"
    assert (tmp_path / "order").read_text() == "put"
