"""What a checkpoint holds beside the ranks' files, made once for all saves of the same layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from shoal.checkpoint.index import INDEX_NAME, index_of, write_index
from shoal.checkpoint.metadata import METADATA_NAME, dcp_metadata
from shoal.checkpoint.shard import Layout, Shard
from shoal.checkpoint.snapshot import Snapshot
from shoal.errors import WorkError
from shoal.storage import Contents, Location, OptimizerRecord

ATTACHMENTS = "attachments"
"""Folder of a checkpoint for files that travel with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one rank reports to the one that publishes."""

    shard: Shard
    optimizer_kind: str | None
    stateless: frozenset[str]

    @classmethod
    def of(cls, layout: Layout, snapshot: Snapshot) -> Part:
        """This rank's."""
        return cls(
            shard=layout.shard,
            optimizer_kind=snapshot.optimizer_kind,
            stateless=snapshot.stateless,
        )


def contents_of(parts: Sequence[Part]) -> Contents:
    """The descriptions of what all ranks write.

    Raises WorkError where ranks disagree about a tensor, or do not tile it exactly.
    """
    files = descriptions([part.shard for part in parts])
    return Contents(files=files, optimizer=_optimizer_record(parts))


def descriptions(shards: Sequence[Shard]) -> dict[str, Location | bytes]:
    """The files that say where everything lies, for our reader and for DCP's.

    Raises as ``contents_of``.
    """
    return {INDEX_NAME: write_index(index_of(shards)), METADATA_NAME: dcp_metadata(shards)}


def attached(attachments: Mapping[str, Location | bytes]) -> dict[str, Location | bytes]:
    """Attachments by path in the checkpoint; raises WorkError for a name that leads out of it."""
    files: dict[str, Location | bytes] = {}
    for name, content in attachments.items():
        place = PurePosixPath(ATTACHMENTS, name)
        if PurePosixPath(name).is_absolute() or ".." in place.parts:
            raise WorkError(f"{name} is no name for a file inside a checkpoint.")
        files[str(place)] = content
    return files


def _optimizer_record(parts: Sequence[Part]) -> OptimizerRecord | None:
    kind = parts[0].optimizer_kind
    if kind is None:
        return None
    stateless = frozenset[str]().union(*(part.stateless for part in parts))
    return OptimizerRecord(kind=kind, stateless=tuple(sorted(stateless)))
