"""Saving without waiting: copy the state aside, and let other processes write it.

    main thread   ─ step ─ save ─ forward, backward ─┬─ step ─ ...        every rank
    stager thread          └─ copy ─► staging memory ┘  │
    writer process                        └─► file ─ note ─┐              one a rank
    first writer                             all notes ────┴─► publish ─► prune

Only the copy holds the loop up: the optimizer's next step waits for it, forward and backward do
not. There is room for two saves; a third waits for the first, and says so.

Ranks tell each other how saves came out when the next one begins, and at the end, in one exchange
of the main threads: nothing is sent between ranks at any other time, so no collective of the
training can meet one of the saving in another order. Every rank decides by the same reports:

    staged ─► written by all, published ───────────────────────────────► reported
       └────► failed on some rank ─► given up by all ─┬─► stop, warn ──► reported
                                                      └─► retry: the copies written again, once

A state that some rank could not copy aside is not written, nor tried again: by the time that the
ranks tell each other, it is gone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

from shoal.checkpoint.contents import attached
from shoal.checkpoint.description import Description
from shoal.checkpoint.failure import OnFailure
from shoal.checkpoint.saver import Saver
from shoal.checkpoint.snapshot import Snapshot, take_snapshot
from shoal.checkpoint.stager import NUM_BUFFERS, Stager
from shoal.checkpoint.state import State
from shoal.checkpoint.writing import SaveUnderWay, Writing
from shoal.errors import ShoalError, WorkError
from shoal.storage import Location, Outcome, Place, Publication, WriteJob, new_token

LOOK_S = 0.05
"""Seconds between two exchanges while ranks wait for a save to end."""

LAST_S = 10.0
"""Seconds for saves to end after a failure of the run, when ranks cannot ask each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _News:
    """What a rank tells the others."""

    outcomes: tuple[Outcome | None, ...] = ()
    """Of the saves under way, in their order."""

    are_staged: tuple[bool, ...] = ()
    """Whether this rank's copies for them were made."""

    token: str = ""
    """For a save that begins; the first rank's counts."""

    is_new: bool = False
    """Whether its layout is another than that of the save before."""

    failure: ShoalError | None = None
    """Why its state cannot be saved."""


@dataclass(kw_only=True, eq=False)
class BackgroundSaver(Saver):
    """See ``Saver``. Between ``save`` and the optimizer's next step, weights must stay."""

    patience_s: float
    """How long the ranks wait for each other's disks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._saves: list[SaveUnderWay] = []
        self._described: Description | None = None

    def __enter__(self) -> Self:
        """See ``Saver``."""
        super().__enter__()
        self._stager = Stager()
        self._writing = Writing(self._peers.rank, self._stager.buffers, patience_s=self.patience_s)
        return self

    @property
    def writer_pid(self) -> int:
        """The process that writes for this rank."""
        return self._writing.pid

    def save(self, step: int, state: State) -> None:
        """See ``Saver``."""
        start = time.monotonic()
        self.staged()
        failure: ShoalError | None = None
        try:
            beside = attached(state.attachments)
            snapshot = take_snapshot(state, rank=self._peers.rank, num_ranks=self._peers.size)
            described = Description.of(snapshot, self._peers.rank, self._described)
        except ShoalError as error:  # the others would wait for this rank: all are told first
            failure = error
        is_new = failure is None and described is not self._described
        news = self._exchange(_News(token=new_token(), is_new=is_new, failure=failure))
        failures = [each.failure for each in news if each.failure is not None]
        if failures:
            raise failures[0] from failure
        waiting = time.monotonic()
        while len(self._saves) >= NUM_BUFFERS:
            self._exchange(_News(), patient=True)
        waited_s = time.monotonic() - waiting
        if any(each.is_new for each in news):
            self._described = described.told(self._deed, snapshot, self._peers)
            described = self._described
        place = Place(folder=self.folder, step=step, token=news[0].token)
        save = self._begin(place, described, beside, start)
        save.waited_s = waited_s
        self._stage(save, described, snapshot)
        self._stager.watch(state.optimizer, self.staged)
        save.stall_s += time.monotonic() - start

    def staged(self) -> None:
        """Wait until the copy is made; the optimizer's step does so by itself."""
        if not self._stager.is_busy:
            return
        save, start = self._saves[-1], time.monotonic()
        try:
            self._stager.wait()
            save.is_staged = True
        except WorkError as error:
            self._note_unstaged(save, error)
        save.stall_s += time.monotonic() - start

    def poll(self) -> None:
        """See ``Saver``."""
        if self._peers.first and not self._stager.is_busy and self._saves:
            self._hear()

    def num_under_way(self, *, poll: bool = False) -> int:
        """Saves of which this rank has not heard how they came out; ``poll`` listens first."""
        if poll:
            self.staged()
            self._hear()
        return sum(save.outcome is None for save in self._saves)

    def settle(self) -> None:
        """See ``Saver``."""
        self.staged()
        while self._saves:
            self._exchange(_News(), patient=True)

    def _let_go(self, error: BaseException | None) -> None:
        """See ``Saver``."""
        try:
            if error is None or isinstance(error, Exception):
                self._finish_alone()
        finally:
            self._writing.close()
            self._stager.close()

    @property
    def _deed(self) -> str:
        return f"Saving in {self.folder}"

    def _begin(
        self,
        place: Place,
        described: Description,
        beside: Mapping[str, Location | bytes],
        start: float,
    ) -> SaveUnderWay:
        """Take memory for a save, and a place among those under way."""
        buffer = self._stager.free([save.buffer for save in self._saves])
        publication = None
        if described.contents is not None:
            publication = Publication(
                num_bytes=described.num_bytes,
                names=described.names,
                contents=described.contents.beside(beside),
                keep=self.keep,
            )
        job = WriteJob(
            place=place,
            name=described.layout.shard.name,
            descriptor=buffer.descriptor,
            num_bytes=described.layout.shard.num_bytes,
            patience_s=self.patience_s,
            publication=publication,
        )
        save = SaveUnderWay(job=job, buffer=buffer, num_bytes=described.num_bytes, start=start)
        self._saves.append(save)
        return save

    def _stage(self, save: SaveUnderWay, described: Description, snapshot: Snapshot) -> None:
        """Begin to copy; once that is done the writer takes over."""
        try:
            self._stager.stage(
                save.buffer, described.layout, snapshot, partial(self._writing.send, save)
            )
        except WorkError as error:
            self._note_unstaged(save, error)

    def _note_unstaged(self, save: SaveUnderWay, error: WorkError) -> None:
        """Have the others told with the next exchange, as of a full disk."""
        save.end(Outcome(token=save.token, error=f"Rank {self._peers.rank}: {error}"))

    def _exchange(self, news: _News, *, patient: bool = False) -> list[_News]:
        """Tell each other how saves came out, and act on it; ``patient`` waits for one a moment.

        Raises WorkError on every rank where a save failed and the policy is to stop.
        """
        self._hear(LOOK_S if patient and self._peers.first else 0.0)
        self._give_up_overdue()
        own = replace(
            news,
            outcomes=tuple(save.outcome for save in self._saves),
            are_staged=tuple(save.is_staged for save in self._saves),
        )
        told = self._peers.share(self._deed, own)
        problem: WorkError | None = None
        has_failed = False
        for index, save in enumerate(tuple(self._saves)):
            answers = [each.outcomes[index] for each in told]
            errors = [answer.error for answer in answers if answer is not None and answer.error]
            if errors:
                has_failed = True
                is_staged = all(each.are_staged[index] for each in told)
                problem = self._fail(save, errors[0], is_staged=is_staged) or problem
            elif answers[0] is not None:
                self._saves.remove(save)
                self._report(save)
                self._failed = None
        if has_failed:
            # A rank whose writer does not answer took a while; no other goes on without it to a
            # collective of the training, which waits for less long.
            self._peers.share(self._deed, None)
        if problem is not None:
            raise problem
        return told

    def _hear(self, timeout_s: float = 0.0) -> None:
        """Note what this rank's writer says; the first rank reports what is published."""
        self._writing.hear(self._saves, timeout_s)
        for save in self._saves:
            if save.is_published:
                self._report(save)

    def _give_up_overdue(self) -> None:
        """Have saves fail of which the publisher, whose disk may hang, says nothing."""
        for save in self._saves if self._peers.first else ():
            limit_s = 2 * self.patience_s
            if save.outcome is None and time.monotonic() - save.tried > limit_s:
                self._writing.give_up(save, self._saves)
                if not save.is_published:  # as it may be until then
                    error = f"{self.folder}: no answer of the disk in {limit_s:g} s"
                    save.end(Outcome(token=save.token, error=error))

    def _fail(self, save: SaveUnderWay, error: str, *, is_staged: bool) -> WorkError | None:
        """Act on a failed save as the policy says; what to raise, if anything.

        ``is_staged`` says whether every rank has its copy.
        """
        self._writing.give_up(save, self._saves)
        self._saves.remove(save)
        is_retried = self.on_failure is OnFailure.RETRY
        is_tried_again = is_retried and is_staged and not save.is_second_try
        self._report(save, error, is_tried_again=is_tried_again)
        if is_tried_again:
            again = save.again()
            self._saves.append(again)
            self._stager.do(partial(self._writing.send, again))
            return None
        self._failed = (save.step, error)
        if self.on_failure is OnFailure.WARN:
            return None
        return WorkError(f"Step {save.step} was not saved. {error}")

    def _finish_alone(self) -> None:
        """Let saves under way end without asking the other ranks, which may be gone."""
        self.staged()
        deadline = time.monotonic() + LAST_S
        while any(save.outcome is None for save in self._saves):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            self._hear(left_s)
        for save in self._saves:
            if save.outcome is not None and save.outcome.error is not None:
                self._report(save, save.outcome.error)

    def _report(
        self, save: SaveUnderWay, error: str | None = None, *, is_tried_again: bool = False
    ) -> None:
        """Report how a save came out, once, on the first rank."""
        if not save.is_reported:
            save.is_reported = True
            self._tell(save.report(error, is_tried_again=is_tried_again))
