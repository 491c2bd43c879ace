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

    staged ─► written by all, published ─────────────────────────────► reported
       └────► failed on some rank ─► given up by all ─┬─► stop, warn ─► reported
                                                      └─► retry: staged again, once
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn

from shoal.checkpoint.contents import Part, attached, contents_of
from shoal.checkpoint.failure import Note, OnFailure, SaveReport
from shoal.checkpoint.peers import Peers
from shoal.checkpoint.saver import check_shared
from shoal.checkpoint.shard import Layout, lay_out, layout_key, values_of
from shoal.checkpoint.snapshot import Snapshot, take_snapshot
from shoal.checkpoint.staging import StagingBuffer
from shoal.checkpoint.writing import SaveUnderWay, Writing
from shoal.errors import ShoalError, WorkError
from shoal.storage import Contents, Location, Outcome, Place, Publication, WriteJob, new_token

NUM_BUFFERS = 2
"""Saves that may be under way; each takes memory for all that the rank writes."""

LOOK_S = 0.05
"""Seconds between two exchanges while ranks wait for a save to end."""

LAST_S = 10.0
"""Seconds for saves to end after a failure of the run, when ranks cannot ask each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _News:
    """What a rank tells the others."""

    outcomes: tuple[Outcome | None, ...] = ()
    """Of the saves under way, in their order."""

    token: str = ""
    """For a save that begins; the first rank's counts."""

    is_new: bool = False
    """Whether its layout is another than that of the save before."""

    failure: ShoalError | None = None
    """Why its state cannot be saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Described:
    """A layout that all ranks know of."""

    key: tuple[object, ...]
    layout: Layout
    names: tuple[str, ...] = ()
    """Files of all ranks; the first rank knows, as it knows what follows."""
    num_bytes: int = 0
    contents: Contents | None = None


class BackgroundSaver:
    """See ``Saver``. Between ``save`` and the optimizer's next step, weights must stay."""

    def __init__(
        self,
        folder: Location,
        *,
        keep: int | None = None,
        on_failure: OnFailure = OnFailure.STOP,
        note: Note,
        patience_s: float,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """``folder`` holds the run's checkpoints, of which the newest ``keep`` stay.

        ``patience_s`` is how long the ranks wait for each other's disks.
        """
        self._folder = folder
        self._keep = keep
        self._on_failure = on_failure
        self._note = note
        self._patience_s = patience_s
        self._peers = Peers(group)
        self._saves: list[SaveUnderWay] = []
        self._buffers: list[StagingBuffer] = []
        self._stager = ThreadPoolExecutor(max_workers=1, thread_name_prefix="stage-checkpoint")
        self._staging: Future[None] | None = None
        self._described: _Described | None = None
        self._hook: Any = None
        self._failed: tuple[int, str] | None = None

    def __enter__(self) -> Self:
        """See ``Saver``."""
        check_shared(self._folder, self._peers)
        self._buffers = [StagingBuffer() for _ in range(NUM_BUFFERS)]
        self._writing = Writing(self._peers.rank, self._buffers)
        return self

    @property
    def writer_pid(self) -> int:
        """The process that writes for this rank."""
        return self._writing.pid

    def save(
        self,
        step: int,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        counters: Mapping[str, object],
        rng: Mapping[str, torch.Tensor] | None = None,
        attachments: Mapping[str, Path | bytes] | None = None,
    ) -> None:
        """See ``Saver``."""
        start = time.monotonic()
        self.staged()
        failure: ShoalError | None = None
        try:
            beside = attached(attachments or {})
            snapshot = take_snapshot(
                model=model,
                optimizer=optimizer,
                counters=counters,
                rng=rng,
                rank=self._peers.rank,
                num_ranks=self._peers.size,
            )
            described = self._describe(snapshot)
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
            described = self._tell(described, snapshot)
        place = Place(folder=self._folder, step=step, token=news[0].token)
        save = self._begin(place, described, beside, start)
        save.waited_s = waited_s
        self._stage(save, described.layout, snapshot)
        self._watch(optimizer)
        save.stall_s += time.monotonic() - start

    def staged(self) -> None:
        """Wait until the copy is made; the optimizer's step does so by itself."""
        if self._staging is not None:
            start = time.monotonic()
            self._staging.result()
            self._staging = None
            self._saves[-1].stall_s += time.monotonic() - start

    def poll(self) -> None:
        """See ``Saver``."""
        if self._peers.first and self._staging is None and self._saves:
            self._hear()

    def num_under_way(self, *, poll: bool = False) -> int:
        """Saves of which this rank has not heard how they came out; ``poll`` listens first."""
        if poll:
            self.staged()
            self._hear()
        return sum(save.outcome is None for save in self._saves)

    def drain(self) -> None:
        """See ``Saver``."""
        self.staged()
        while self._saves:
            self._exchange(_News(), patient=True)
        if self._failed is not None:
            raise WorkError("The last state is not saved. {}: {}".format(*self._failed))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """See ``Saver``."""
        try:
            if kind is None or issubclass(kind, Exception):
                self._finish_alone()
        finally:
            if self._hook is not None:
                self._hook.remove()
            self._writing.close()
            self._stager.shutdown()
            for buffer in self._buffers:
                buffer.close()

    def _describe(self, snapshot: Snapshot) -> _Described:
        """What is known of such a state, or a layout that the others still have to be told of."""
        key = (
            *layout_key(snapshot.entries, snapshot.blobs),
            snapshot.optimizer_kind,
            snapshot.stateless,
        )
        if self._described is not None and key == self._described.key:
            return self._described
        layout = lay_out(self._peers.rank, snapshot.entries, snapshot.blobs)
        return _Described(key=key, layout=layout)

    def _tell(self, described: _Described, snapshot: Snapshot) -> _Described:
        """Tell the first rank of new layouts; it describes them all, or every rank raises."""
        deed = f"Saving in {self._folder}"
        parts = self._peers.gather(deed, Part.of(described.layout, snapshot))

        def describe() -> _Described:
            return _Described(
                key=described.key,
                layout=described.layout,
                names=tuple(part.shard.name for part in parts),
                num_bytes=sum(part.shard.num_bytes for part in parts),
                contents=contents_of(parts) if parts else None,
            )

        self._described = self._peers.each(deed, describe)
        return self._described

    def _begin(
        self, place: Place, described: _Described, beside: Mapping[str, Path | bytes], start: float
    ) -> SaveUnderWay:
        """Take memory for a save, and a place among those under way."""
        used = [save.buffer for save in self._saves]
        buffer = next(buffer for buffer in self._buffers if buffer not in used)
        publication = None
        if described.contents is not None:
            publication = Publication(
                num_bytes=described.num_bytes,
                names=described.names,
                contents=described.contents.beside(beside),
                keep=self._keep,
            )
        job = WriteJob(
            place=place,
            name=described.layout.shard.name,
            descriptor=buffer.descriptor,
            num_bytes=described.layout.shard.num_bytes,
            patience_s=self._patience_s,
            publication=publication,
        )
        save = SaveUnderWay(job=job, buffer=buffer, num_bytes=described.num_bytes, start=start)
        self._saves.append(save)
        return save

    def _stage(self, save: SaveUnderWay, layout: Layout, snapshot: Snapshot) -> None:
        """Begin to copy; once that is done the writer takes over."""
        values = values_of(layout, snapshot.entries)
        try:
            save.buffer.lay(layout, values, snapshot.blobs)
        except WorkError as error:  # told to the others with the next exchange, like a full disk
            save.end(Outcome(token=save.token, error=f"Rank {self._peers.rank}: {error}"))
            return
        ready = None
        if any(value.is_cuda for value in values):
            ready = torch.cuda.current_stream().record_event()
        self._staging = self._stager.submit(save.buffer.fill, values, ready)
        # A task of its own: the message may have to wait for the disk, which the loop must not.
        self._stager.submit(self._writing.send, save)

    def _watch(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Have the next step wait for the copy; without an optimizer, wait now."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        if optimizer is None:
            self.staged()
        else:
            self._hook = optimizer.register_step_pre_hook(lambda *_: self.staged())

    def _exchange(self, news: _News, *, patient: bool = False) -> list[_News]:
        """Tell each other how saves came out, and act on it; ``patient`` waits for one a moment.

        Raises WorkError on every rank where a save failed and the policy is to stop.
        """
        self._hear(LOOK_S if patient and self._peers.first else 0.0)
        outcomes = tuple(save.outcome for save in self._saves)
        own = _News(outcomes=outcomes, token=news.token, is_new=news.is_new, failure=news.failure)
        told = self._peers.share(f"Saving in {self._folder}", own)
        problem: WorkError | None = None
        for index, save in enumerate(tuple(self._saves)):
            answers = [each.outcomes[index] for each in told]
            errors = [answer.error for answer in answers if answer is not None and answer.error]
            if errors:
                problem = self._fail(save, errors[0]) or problem
            elif answers[0] is not None:
                self._saves.remove(save)
                self._report(save)
                self._failed = None
        if problem is not None:
            raise problem
        return told

    def _hear(self, timeout_s: float = 0.0) -> None:
        """Note what this rank's writer says; the first rank reports what is published."""
        self._writing.hear(self._saves, timeout_s)
        for save in self._saves:
            overdue = time.monotonic() - save.start > 2 * self._patience_s
            if save.outcome is None and overdue and self._peers.first:
                error = f"{self._folder}: no answer of the disk in {2 * self._patience_s:g} s"
                save.end(Outcome(token=save.token, error=error))
            if save.is_published:
                self._report(save)

    def _fail(self, save: SaveUnderWay, error: str) -> WorkError | None:
        """Act on a failed save as the policy says; what to raise, if anything."""
        self._writing.give_up(save, self._saves)
        self._saves.remove(save)
        is_tried_again = self._on_failure is OnFailure.RETRY and not save.is_second_try
        self._report(save, error, is_tried_again=is_tried_again)
        if is_tried_again:
            again = save.again()
            self._saves.append(again)
            self._stager.submit(self._writing.send, again)
            return None
        self._failed = (save.step, error)
        if self._on_failure is OnFailure.WARN:
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
        if not self._peers.first or save.is_reported:
            return
        save.is_reported = True
        self._note(
            SaveReport(
                step=save.step,
                path=save.job.place.final if error is None else None,
                num_bytes=save.num_bytes,
                seconds=save.seconds,
                stall_s=save.stall_s,
                waited_s=save.waited_s,
                error=error,
                is_tried_again=is_tried_again,
            )
        )
