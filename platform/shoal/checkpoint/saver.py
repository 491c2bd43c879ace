"""How a run saves: what ``BackgroundSaver`` and ``DirectSaver`` have in common."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import torch
import torch.distributed as dist
from torch import nn

from shoal.checkpoint.failure import Note, OnFailure, SaveReport
from shoal.checkpoint.peers import Peers
from shoal.checkpoint.save import Saved, save
from shoal.errors import WorkError
from shoal.storage import Location, Place, medium_of, new_token, prune_or_warn


class Saver(Protocol):
    """Saves one run's steps; every rank has one and calls it alike."""

    def __enter__(self) -> Self:
        """Refuse a folder that ranks do not share, and get ready."""

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
        """Save a step, or begin to; the arguments are those of ``shoal.checkpoint.save``.

        Raises WorkError on every rank where this or an earlier save failed and the policy wants it.
        """

    def poll(self) -> None:
        """Report what came out since; cheap, for every step."""

    def drain(self) -> None:
        """Wait until all is published; raises WorkError where the last state is not."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Let go; after a failure of the run, what it saved before is still published."""


class DirectSaver:
    """Saves while the run waits."""

    def __init__(
        self,
        folder: Location,
        *,
        keep: int | None = None,
        on_failure: OnFailure = OnFailure.STOP,
        note: Note,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """``folder`` holds the run's checkpoints, of which the newest ``keep`` stay."""
        self._folder = folder
        self._keep = keep
        self._on_failure = on_failure
        self._note = note
        self._group = group
        self._peers = Peers(group)
        self._failed: str | None = None

    def __enter__(self) -> Self:
        """See ``Saver``."""
        check_shared(self._folder, self._peers)
        return self

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
        for is_last in (self._on_failure is not OnFailure.RETRY, True):
            try:
                saved = save(
                    self._folder,
                    step,
                    model=model,
                    optimizer=optimizer,
                    counters=counters,
                    rng=rng,
                    attachments=attachments,
                    group=self._group,
                )
            except WorkError as error:
                self._failed = str(error)
                self._report(step, error=str(error), is_tried_again=not is_last)
                if is_last and self._on_failure is not OnFailure.WARN:
                    raise
                if is_last:
                    return
            else:
                self._failed = None
                self._report(step, saved)
                if self._peers.first:
                    prune_or_warn(self._folder, self._keep)
                return

    def poll(self) -> None:
        """See ``Saver``."""

    def drain(self) -> None:
        """See ``Saver``."""
        if self._failed is not None:
            raise WorkError(f"The last state is not saved: {self._failed}")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """See ``Saver``."""

    def _report(
        self,
        step: int,
        saved: Saved | None = None,
        *,
        error: str | None = None,
        is_tried_again: bool = False,
    ) -> None:
        if self._peers.first:
            seconds = 0.0 if saved is None else saved.seconds
            self._note(
                SaveReport(
                    step=step,
                    path=None if saved is None else saved.path,
                    num_bytes=0 if saved is None else saved.num_bytes,
                    seconds=seconds,
                    stall_s=seconds,
                    waited_s=0.0,
                    error=error,
                    is_tried_again=is_tried_again,
                )
            )


def check_shared(folder: Location, peers: Peers) -> None:
    """Make the folder of a run's checkpoints and refuse one that is another on another node."""
    deed = f"Looking at {folder}"
    # Named like a save, so that it is deleted like one, should this be killed in between.
    probe = Place(folder=folder, step=0, token=peers.share(deed, new_token())[0]).draft

    def make() -> None:
        if peers.first:
            medium_of(folder).begin(probe)

    def look() -> None:
        if not medium_of(folder).has_begun(probe):
            raise WorkError(
                f"Rank {peers.rank} sees another {folder} than the first rank: "
                "every node must share the run's folder."
            )

    peers.each(deed, make)
    try:
        peers.each(deed, look)
    finally:
        if peers.first:
            medium_of(folder).remove(probe)
