"""What steps are kept on: a file system, or a store of objects.

The rules, what is a step, when it is published, which may go, are in ``publish``, ``catalog``,
``parts`` and ``verify``, once. A medium says how its files are read and written (``Files``), and
how a folder of files comes to be a step (``Medium``):

                    a file system (``local``)            a store (``store``)
    under way       .step-00000010.tmp-<token>           step-00000010-<token> without a manifest
    published       step-00000010: renamed at once       the same, once its manifest is written
    being deleted   .step-00000010.old-<token>           the same, whose manifest went first

Every method may raise ``OSError``, whose words are the system's or the store's.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from shoal.storage.location import Location

MANIFEST_NAME = "manifest.json"
"""The file that says what a step holds; in a store, the one that makes it a step."""

SAVE_FOLDER = ".save"
"""Folder in that of a save under way for what the writing processes tell each other."""


def new_token() -> str:
    """Tells a save from any other of the same step."""
    return uuid.uuid4().hex[:8]


class Sink(Protocol):
    """A new file under way."""

    def write(self, view: memoryview) -> None:
        """Append all of it; the memory is the caller's again afterwards."""

    def finish(self, *, flush: bool) -> int:
        """Complete the file; how many bytes the medium holds of it. ``flush`` makes it last."""

    def close(self) -> None:
        """Let go of it, finished or not; raises nothing."""


class Source(Protocol):
    """A file that is read, by one thread."""

    @property
    def piece_bytes(self) -> int:
        """How much to ask for at a time."""

    def read(self, start: int, memories: Sequence[memoryview]) -> int:
        """Read what follows byte ``start`` into ``memories`` in turn; how much, 0 at the end."""


class Files(Protocol):
    """Reads and writes whole files and parts of them."""

    def num_readers(self, sharers: int = 1) -> int:
        """Threads that it takes to read as fast as the medium gives.

        In each of ``sharers`` processes of this host that read at the same time.
        """

    def create(self, file: Location) -> Sink:
        """Begin a file that is not there yet."""

    def open(self, file: Location) -> AbstractContextManager[Source]:
        """Open a file to read ranges of it."""

    def read(self, file: Location) -> bytes:
        """All of a small file; FileNotFoundError where it is not there."""

    def put(self, file: Location, data: bytes) -> None:
        """Write a small file, over one that is there; nobody sees half of it."""

    def delete(self, file: Location) -> None:
        """Delete a file, which is there."""

    def sizes(self, folder: Location) -> dict[str, int]:
        """Bytes of each file in a folder and below it, by its path in there."""


class State(Enum):
    """How far the folder of a step is."""

    PUBLISHED = auto()
    UNDER_WAY = auto()
    """Or left behind by a save that was killed."""
    DELETED = auto()
    """In part; or left behind by whoever was killed while deleting it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFolder:
    """A folder that a save has made; what others have made is none."""

    number: int
    path: Location
    state: State


class Medium(Files, Protocol):
    """Takes the folders of steps through their life."""

    @property
    def look_s(self) -> float:
        """Seconds between two looks of whoever waits for a file to appear."""

    def step_folders(self, folder: Location) -> Iterator[StepFolder]:
        """All in a folder of checkpoints, in no order; none where there is no such folder."""

    def draft(self, folder: Location, number: int, token: str) -> Location:
        """Where a step is while it is under way."""

    def final(self, folder: Location, number: int, token: str) -> Location:
        """Where it is once it is published."""

    def begin(self, draft: Location) -> None:
        """Make the folder of a save with ``SAVE_FOLDER``, and of the checkpoints if need be."""

    def has_begun(self, draft: Location) -> bool:
        """Whether it is there; other nodes see it as well, or share no medium."""

    def publish(self, draft: Location, final: Location, added: Collection[str]) -> None:
        """Make a step of a complete folder, whose manifest was the last of the files ``added``.

        Everything lasts afterwards: the ranks' files, which were finished with ``flush``, and
        these, which were not. ``SAVE_FOLDER`` goes.
        """

    def remove(self, path: Location) -> None:
        """Delete the folder of a step; it is no step any more before the first file goes."""

    def set_aside(self, step: StepFolder, token: str) -> None:
        """Make room for a step of the same number, whose folder is damaged."""

    def room(self, folder: Location) -> int | None:
        """Free bytes; none where the medium does not tell."""
