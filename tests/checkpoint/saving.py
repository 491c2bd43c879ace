"""A plain model that trains and saves in the background, in this process or several."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import nn

from shoal.checkpoint import BackgroundSaver, Location, SaveReport, State, capture_rng
from shoal.endings import when_told_to_end
from tests.checkpoint.plain import model_of, trained


@dataclass(kw_only=True)
class Trainer:
    """One rank's model, optimizer and saver."""

    saver: BackgroundSaver
    reports: list[SaveReport]
    model: nn.Module = field(default_factory=lambda: model_of(1))

    def __post_init__(self) -> None:
        self.optimizer = trained(self.model, num_steps=1)

    def step(self) -> None:
        """Change weights and moments."""
        self.model(torch.arange(7)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, step: int) -> None:
        """Begin to save."""
        state = State(
            model=self.model,
            optimizer=self.optimizer,
            counters={"step": step},
            rng=capture_rng(),
        )
        self.saver.save(step, state)

    def errors(self) -> list[tuple[int, str | None, bool]]:
        """Step, error and whether it is tried again, of each report."""
        return [(r.step, r.error, r.is_tried_again) for r in self.reports]


@contextmanager
def training(folder: Location, **options: Any) -> Iterator[Trainer]:
    """A trainer whose steps are saved in ``folder``."""
    reports: list[SaveReport] = []
    options = {"patience_s": 20.0, **options}
    with BackgroundSaver(folder, note=reports.append, **options) as saver:
        yield Trainer(saver=saver, reports=reports)


@contextmanager
def stopped(pid: int) -> Iterator[Callable[[], None]]:
    """A process that does not run, until the block ends or what is given is called."""
    os.kill(pid, signal.SIGSTOP)

    def go_on() -> None:
        os.kill(pid, signal.SIGCONT)

    try:
        yield go_on
    finally:
        go_on()


def kill(pid: int) -> None:
    """Kill a child of this process, and wait until it is dead; its parent has yet to look."""
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: state_of(pid) == "Z")


def state_of(pid: int) -> str:
    """A process's state: ``Z`` for dead, ``D`` for one that waits and that no signal reaches."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def later(seconds: float, deed: Callable[[], None]) -> threading.Timer:
    """Do something from another thread after a while."""
    timer = threading.Timer(seconds, deed)
    timer.start()
    return timer


def wait_until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Fail where something does not come about in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.01)


def files_of(path: Path) -> dict[str, bytes]:
    """Every file of a checkpoint."""
    return {str(f.relative_to(path)): f.read_bytes() for f in path.rglob("*") if f.is_file()}


@contextmanager
def told_to_end() -> Iterator[None]:
    """What follows the block's own lines is SIGTERM to this process, waited for."""

    def leave(number: signal.Signals) -> NoReturn:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), when_told_to_end(leave):
        yield
        time.sleep(60)
