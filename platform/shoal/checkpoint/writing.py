"""A rank's saves under way, and the process that writes its part of them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from shoal.checkpoint.failure import SaveReport
from shoal.checkpoint.staging import StagingBuffer
from shoal.storage import Outcome, WriteJob, WriterProcess

logger = logging.getLogger(__name__)

GIVE_UP_S = 10.0
"""Seconds for the process to answer once a save is given up, if ranks have as much patience."""


@dataclass(slots=True, kw_only=True, eq=False)
class SaveUnderWay:
    """One save from its beginning until all ranks know how it came out."""

    job: WriteJob
    buffer: StagingBuffer
    num_bytes: int
    """Of all ranks; known to the first."""
    start: float
    """When it began, by ``time.monotonic``."""
    tried: float = field(default_factory=time.monotonic)
    """When this try of it began."""
    stall_s: float = 0.0
    """How long it held this rank's loop up."""
    waited_s: float = 0.0
    """Of that, how long for earlier saves."""
    seconds: float = 0.0
    """From its beginning to its outcome."""
    outcome: Outcome | None = None
    """This rank's; on the first rank, the publication's."""
    is_staged: bool = False
    """Whether its state is in ``buffer``; from then on it can be written, and written again."""
    process: WriterProcess | None = None
    """The one that may be reading ``buffer``."""
    is_given_up: bool = False
    """Whether no process is to begin with it any more."""
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
            is_staged=self.is_staged,
            is_second_try=True,
        )


class Writing:
    """Hands saves to this rank's process and hears how they came out.

    Where the process dies, the save that it was at has failed; another one takes over the rest.
    A process that is killed and does not end, because its disk hangs, publishes nothing any more.
    It is left behind, and memory that it may be reading is not filled before it has ended.
    """

    def __init__(self, rank: int, buffers: Sequence[StagingBuffer], *, patience_s: float) -> None:
        """``patience_s`` is how long the ranks wait for each other's disks."""
        self._rank = rank
        self._descriptors = [buffer.descriptor for buffer in buffers]
        self._process = WriterProcess.start(self._descriptors)
        self._answer_s = min(GIVE_UP_S, patience_s)
        self._handing = threading.Lock()
        """Held while it changes who has a save, and never while anyone is waited for."""

    @property
    def pid(self) -> int:
        """The process that writes at present."""
        return self._process.pid

    def send(self, save: SaveUnderWay) -> None:
        """Have it written; from any thread. Waits while the process is busy with another."""
        with self._handing:
            if save.is_given_up:
                return
            save.process = process = self._process
        process.send(save.job)

    def hear(self, saves: Sequence[SaveUnderWay], timeout_s: float = 0.0) -> None:
        """Note outcomes of ``saves``; waits for the first one to come."""
        while (outcome := self._process.receive(timeout_s)) is not None:
            timeout_s = 0.0
            for save in saves:
                if save.token == outcome.token:
                    save.process = None
                    save.end(outcome)
        if self._process.has_hung_up:
            self._start_another(saves)

    def give_up(self, save: SaveUnderWay, saves: Sequence[SaveUnderWay]) -> None:
        """Have a save left alone: no process reads its memory afterwards, or publishes it.

        ``saves`` are all under way. One before it, at which the process still is, goes on.
        """
        deadline = time.monotonic() + self._answer_s
        with self._handing:
            save.is_given_up = True
            process = save.process
        if process is None:
            return
        is_told = process.abandon(save.token, self._answer_s)
        self.hear(saves)
        if is_told and any(each.process is process for each in saves[: saves.index(save)]):
            return  # the process has not come to it, and hears before it does that it need not
        while save.process is not None and (left_s := deadline - time.monotonic()) > 0:
            self.hear(saves, left_s)
        if save.process is not None:
            logger.warning("Rank %d: its writing process hangs and is ended.", self._rank)
            self._process.kill()
            self.hear(saves)

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self._process.close()

    def _start_another(self, saves: Sequence[SaveUnderWay]) -> None:
        """After the process died over the first of ``saves`` that it had, or over none."""
        old = self._process
        old.close()
        error = f"Rank {self._rank}: {old.last_word}."
        logger.warning("%s Another one is started.", error)
        with self._handing:
            self._process = WriterProcess.start(self._descriptors)
            had = [save for save in saves if save.process is old]
            rest = [save for save in had[1:] if not save.is_given_up]
            for save in had:
                save.buffer.note_reader(old)
                save.process = self._process if save in rest else None
        for save in had:
            if save not in rest:
                save.end(Outcome(token=save.token, error=error))
        for save in rest:
            save.tried = time.monotonic()
            self._process.send(save.job)
