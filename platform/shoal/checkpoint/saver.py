"""How a run saves: what ``BackgroundSaver`` and ``DirectSaver`` have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import torch.distributed as dist

from shoal.checkpoint.failure import Note, OnFailure, SaveReport
from shoal.checkpoint.peers import Peers
from shoal.checkpoint.state import State
from shoal.errors import WorkError
from shoal.storage import Location, Place, medium_of, new_token


@dataclass(kw_only=True, eq=False)
class Saver(ABC):
    """Saves one run's steps; every rank has one and calls it alike."""

    folder: Location = field(kw_only=False)
    """Holds the run's checkpoints."""

    keep: int | None = None
    """The newest steps that stay; unset keeps all."""

    on_failure: OnFailure = OnFailure.STOP
    """What becomes of the run when a save fails."""

    note: Note
    """Takes reports, on the first rank alone."""

    group: dist.ProcessGroup | None = None
    """The ranks; unset is the default group or, outside of any, this process alone."""

    def __post_init__(self) -> None:
        self._peers = Peers(self.group)
        self._failed: tuple[int, str] | None = None
        """Step and cause of the last save to come out, if that failed."""

    def __enter__(self) -> Self:
        """Refuse a folder that ranks do not share, and get ready."""
        check_shared(self.folder, self._peers)
        return self

    @abstractmethod
    def save(self, step: int, state: State) -> None:
        """Save a step, or begin to.

        Raises WorkError on every rank where this or an earlier save failed and the policy wants it.
        """

    @abstractmethod
    def poll(self) -> None:
        """Report what came out since; cheap, for every step."""

    @abstractmethod
    def settle(self) -> None:
        """Wait until no save is under way. Raises WorkError as ``save`` does."""

    def drain(self) -> None:
        """Wait until all is published; raises WorkError where the last state is not."""
        self.settle()
        if self._failed is not None:
            step, error = self._failed
            raise WorkError(f"The last state is not saved. Step {step}: {error}")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Let go; after a failure of the run, what it saved before is still published."""
        self._let_go(error)

    @abstractmethod
    def _let_go(self, error: BaseException | None) -> None:
        """The run ended, by ``error`` if that is set."""

    def _tell(self, report: SaveReport) -> None:
        """Report how a save came out, on the first rank."""
        if self._peers.first:
            self.note(report)


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
