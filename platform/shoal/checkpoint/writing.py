"""A rank's saves under way, and the process that writes its part of them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal.checkpoint.failure import SaveReport
from shoal.checkpoint.staging import StagingBuffer
from shoal.storage import Abandon, Outcome, WriteJob, WriterProcess

logger = logging.getLogger(__name__)

GIVE_UP_S = 10.0
"""Seconds for the process to answer once a save is given up."""


@dataclass(slots=True, kw_only=True, eq=False)
class SaveUnderWay:
    """One save from its beginning until all ranks know how it came out."""

    job: WriteJob
    buffer: StagingBuffer
    num_bytes: int
    """Of all ranks; known to the first."""
    start: float
    """When it began, by ``time.monotonic``."""
    stall_s: float = 0.0
    """How long it held this rank's loop up."""
    waited_s: float = 0.0
    """Of that, how long for earlier saves."""
    seconds: float = 0.0
    """From its beginning to its outcome."""
    outcome: Outcome | None = None
    """This rank's; on the first rank, the publication's."""
    is_sent: bool = False
    """Whether the process was told of it."""
    is_second_try: bool = False
    is_reported: bool = False

    @property
    def step(self) -> int:
        """Steps taken when it began."""
        return self.job.place.step

    @property
    def token(self) -> str:
        """What its messages go by."""
        return self.job.place.token

    @property
    def is_published(self) -> bool:
        """Whether this rank's outcome is a good one."""
        return self.outcome is not None and self.outcome.error is None

    def end(self, outcome: Outcome) -> None:
        """Note this rank's outcome."""
        self.outcome = outcome
        self.seconds = time.monotonic() - self.start

    def report(self, error: str | None, *, is_tried_again: bool) -> SaveReport:
        """How it came out, for the record."""
        return SaveReport(
            step=self.step,
            path=self.job.place.final if error is None else None,
            num_bytes=self.num_bytes,
            seconds=self.seconds,
            stall_s=self.stall_s,
            waited_s=self.waited_s,
            error=error,
            is_tried_again=is_tried_again,
        )

    def again(self) -> SaveUnderWay:
        """The same state to be written once more, under a token that all ranks derive alike."""
        token = f"{(int(self.token, 16) + 1) % 2**32:08x}"
        place = replace(self.job.place, token=token)
        return SaveUnderWay(
            job=replace(self.job, place=place),
            buffer=self.buffer,
            num_bytes=self.num_bytes,
            start=self.start,
            stall_s=self.stall_s,
            waited_s=self.waited_s,
            is_second_try=True,
        )


class Writing:
    """Hands saves to this rank's process and hears how they came out.

    Where the process dies, the save that it was at has failed; another one takes over the rest.
    """

    def __init__(self, rank: int, buffers: Sequence[StagingBuffer]) -> None:
        self._rank = rank
        self._descriptors = [buffer.descriptor for buffer in buffers]
        self._process = WriterProcess.start(self._descriptors)
        self._sending = threading.Lock()

    @property
    def pid(self) -> int:
        """The process that writes at present."""
        return self._process.pid

    def send(self, save: SaveUnderWay) -> None:
        """Have it written; from any thread."""
        with self._sending:
            save.is_sent = True
            self._process.send(save.job)

    def hear(self, saves: Sequence[SaveUnderWay], timeout_s: float = 0.0) -> None:
        """Note outcomes of ``saves``; waits for the first one to come."""
        while (outcome := self._process.receive(timeout_s)) is not None:
            timeout_s = 0.0
            for save in saves:
                if save.token == outcome.token and save.outcome is None:
                    save.end(outcome)
        if self._process.has_ended:
            self._start_another([save for save in saves if save.outcome is None])

    def give_up(self, save: SaveUnderWay, saves: Sequence[SaveUnderWay]) -> None:
        """Have a save left alone, so that its memory is free again."""
        if save.outcome is not None:
            return
        self._process.send(Abandon(token=save.token))
        deadline = time.monotonic() + GIVE_UP_S
        while save.outcome is None and (left_s := deadline - time.monotonic()) > 0:
            self.hear(saves, left_s)
        if save.outcome is None:
            logger.warning("Rank %d: its writing process hangs and is ended.", self._rank)
            self._process.kill()
            self.hear(saves)

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self._process.close()

    def _start_another(self, saves: Sequence[SaveUnderWay]) -> None:
        """After the process died over the first of ``saves``, or over none."""
        error = f"Rank {self._rank}: {self._process.last_word}."
        logger.warning("%s Another one is started.", error)
        for save in saves[:1]:
            save.end(Outcome(token=save.token, error=error))
        with self._sending:
            self._process.close()
            self._process = WriterProcess.start(self._descriptors)
            for save in saves[1:]:
                if save.is_sent:
                    self._process.send(save.job)
