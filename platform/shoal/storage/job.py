"""What a rank and the process that writes for it tell each other."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.storage.publish import Contents, Place


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteJob:
    """One rank's part in one save; for the publisher, the rest of the save as well."""

    place: Place
    """Where it goes."""

    name: str
    """The rank's file in the temporary folder."""

    descriptor: int
    """Shared memory that holds the file's bytes from its start."""

    num_bytes: int
    """How many."""

    patience_s: float
    """How long this rank waits for the folder to appear, and the publisher for the last part."""

    publication: Publication | None
    """Set for the publisher alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """What the publisher needs to know beside its own part."""

    num_bytes: int
    """Bytes that all ranks write."""

    names: tuple[str, ...]
    """Files of the ranks, in their order."""

    contents: Contents
    """What comes beside them."""

    keep: int | None
    """Newest steps to keep; unset keeps all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Abandon:
    """Give a save up, wherever it stands: it has failed elsewhere."""

    token: str
    """The save."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a job ended: the part is written and, for the publisher, the step published."""

    token: str
    """The save."""

    error: str | None = None
    """What went wrong, in one sentence; unset if nothing did."""
