"""``metrics.jsonl``: one object a step, each step once, with TensorBoard event files beside it.

Rank 0 writes, whoever likes reads while the run goes on. A line is written whole and flushed;
after a resume the lines of steps that will be made again are cut off, so a reader may see the file
shrink.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from shoal.training.lines import (
    LineReader,
    append_line,
    open_lines,
    record_of,
    records,
    writing,
)

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """What one optimizer step did, over all ranks."""

    step: int
    """Steps done, this one included: the first is 1."""

    loss: float
    """Mean cross-entropy of the step's labels, nats per token; 0 if the batch has no label."""

    auxiliary_loss: float | None
    """Load-balancing loss of the experts, mean over sequences, no coefficient; None if dense."""

    grad_norm: float
    """Norm of the gradient over all parameters, before clipping."""

    lr: float
    """Learning rate of this step."""

    tokens: int
    """Tokens of this step's sequences."""

    labels: int
    """Of them, tokens that count in the loss."""

    tokens_per_second: float
    """``tokens / step_seconds``, of all ranks together."""

    step_seconds: float
    """Seconds from the step's first sequence read to its weights updated."""

    memory_bytes: int
    """Peak memory of rank 0 so far: allocated on its GPU, or resident in its process."""


class MetricsWriter:
    """Appends steps to a run's folder; used on rank 0, as a context manager."""

    def __init__(self, folder: Path, *, last_step: int) -> None:
        """Open the files of ``folder``, keeping the steps up to ``last_step`` only.

        Raises WorkError where the folder cannot be written.
        """
        self._path = folder / METRICS_FILE
        with writing(self._path):
            _truncate_after(self._path, last_step)
            self._file = open_lines(self._path)
        self._board = _board(folder, last_step)

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()
        self._close_board()

    def rewind(self, last_step: int) -> None:
        """Drop the steps after ``last_step``: they will be made again.

        Raises WorkError where the folder cannot be written.
        """
        with writing(self._path):
            _truncate_after(self._path, last_step)  # the file is open for appending: at the new end
        self._close_board()
        self._board = _board(self._path.parent, last_step)

    def write(self, metrics: StepMetrics) -> None:
        """Append one step; a reader sees all of it at once.

        Raises WorkError where the disk has no room.
        """
        record = {name: value for name, value in asdict(metrics).items() if value is not None}
        with writing(self._path):
            append_line(self._file, record)
        with writing(self._path.parent / TENSORBOARD_FOLDER):
            for name, value in record.items():
                if name != "step":
                    self._board.add_scalar(name, value, metrics.step)

    def _close_board(self) -> None:
        """Whatever ends the run matters more than a copy of what is in ``metrics.jsonl``."""
        try:
            self._board.close()
        except OSError as error:
            logger.warning("%s ends early: %s", self._board.get_logdir(), error)


class MetricsReader:
    """Follows a ``metrics.jsonl`` that another process writes."""

    def __init__(self, folder: Path) -> None:
        self._reader = LineReader(folder / METRICS_FILE)

    def poll(self) -> list[StepMetrics]:
        """Steps written since the last call; only the newest, where the file was cut meanwhile."""
        new = self._reader.poll()
        lines = new.lines[-1:] if new.was_cut else new.lines
        return [StepMetrics(**{"auxiliary_loss": None, **record}) for record in records(lines)]


def _board(folder: Path, last_step: int) -> SummaryWriter:
    path = folder / TENSORBOARD_FOLDER
    with writing(path):
        return SummaryWriter(str(path), purge_step=last_step + 1)


def _truncate_after(path: Path, last_step: int) -> None:
    """Cut the file before the first line that is of a later step, or damaged by a crash."""
    if not path.exists():
        return
    keep = _length_where(path, lambda record: record["step"] <= last_step)
    if keep < path.stat().st_size:
        os.truncate(path, keep)


def _length_where(path: Path, wanted: Callable[[dict[str, Any]], bool]) -> int:
    """Bytes of the leading whole lines that are ``wanted``."""
    length = 0
    with path.open("rb") as file:
        for line in file:
            record = record_of(line)
            if record is None or not wanted(record):
                break
            length += len(line)
    return length
