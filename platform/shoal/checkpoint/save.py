"""Saving while everyone waits: write under a temporary name, agree that all is well, publish.

    all ranks    first rank
        ├─ agree ── layouts fit together, no such step yet, room on the disk, the save's folder made
        ├─ write ── one file a rank, summed and flushed
        ├─ agree ── every rank wrote: otherwise the folder goes and every rank raises
        │  publish  index, DCP metadata, attachments, manifest, and it is a step
        └─ agree ── published: otherwise the folder goes and every rank raises

A step is published whole or not at all. A killed save leaves a folder of its own name,
which nobody reads and the next save deletes. ``background`` saves without waiting.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from shoal.checkpoint.contents import Part, attached, contents_of
from shoal.checkpoint.peers import Peers
from shoal.checkpoint.shard import Layout, lay_out, values_of, write_shard
from shoal.checkpoint.snapshot import Snapshot, take_snapshot
from shoal.checkpoint.state import State
from shoal.errors import WorkError
from shoal.storage import (
    Contents,
    FileRecord,
    Location,
    Place,
    discard,
    medium_of,
    new_token,
    prepare,
    publish,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A checkpoint just published."""

    step: int
    """Steps taken when it was saved."""

    path: Location
    """Its folder."""

    num_bytes: int
    """Bytes that all ranks wrote."""

    seconds: float
    """How long this rank was busy with it."""


def save(
    folder: Location,
    step: int,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    counters: Mapping[str, object],
    rng: Mapping[str, torch.Tensor] | None = None,
    attachments: Mapping[str, Location | bytes] | None = None,
    group: dist.ProcessGroup | None = None,
) -> Saved:
    """Save a run's state as a step of ``folder``; every rank of ``group`` calls it alike.

    ``folder`` holds the run's checkpoints and is seen by every rank; ``State`` says what the rest
    is. ``group`` unset is the default group or, outside of any, this process alone.

    Raises WorkError on every rank, at the latest after the group's timeout, where any rank fails:
    nothing is published then, and earlier steps stay as they were. A complete step of the same
    number is refused; a damaged one is moved aside.
    """
    state = State(
        model=model,
        optimizer=optimizer,
        counters=counters,
        rng=rng,
        attachments=attachments or {},
    )
    return save_state(folder, step, state, group=group)


def save_state(
    folder: Location, step: int, state: State, *, group: dist.ProcessGroup | None = None
) -> Saved:
    """See ``save``."""
    start = time.monotonic()
    peers = Peers(group)
    deed = f"Saving step {step} in {folder}"

    def look() -> tuple[Snapshot, Layout]:
        snapshot = take_snapshot(state, rank=peers.rank, num_ranks=peers.size)
        return snapshot, lay_out(peers.rank, snapshot.entries, snapshot.blobs)

    snapshot, layout = peers.each(deed, look)
    parts = peers.gather(deed, Part.of(layout, snapshot))
    num_bytes = sum(peers.share(deed, layout.shard.num_bytes))
    place = Place(folder=folder, step=step, token=peers.share(deed, new_token())[0])
    published = False
    try:
        contents = peers.each(deed, lambda: _prepare(place, num_bytes, parts, state.attachments))
        record = peers.each(deed, lambda: _write(place, snapshot, layout, peers))
        records = peers.gather(deed, record)
        names = [part.shard.name for part in parts]
        peers.each(deed, lambda: _publish(place, names, records, contents))
        published = True
    finally:
        if peers.first and not published:
            discard(place.draft)
    return Saved(step=step, path=place.final, num_bytes=num_bytes, seconds=time.monotonic() - start)


def _prepare(
    place: Place, num_bytes: int, parts: Sequence[Part], attachments: Mapping[str, Location | bytes]
) -> Contents | None:
    """Only the first rank has ``parts``, and acts."""
    if not parts:
        return None
    contents = contents_of(parts).beside(attached(attachments))
    prepare(place, num_bytes)
    return contents


def _write(place: Place, snapshot: Snapshot, layout: Layout, peers: Peers) -> FileRecord:
    if not medium_of(place.folder).has_begun(place.draft):
        raise WorkError(
            f"Rank {peers.rank} does not see {place.draft}: every node must share the run's folder."
        )
    return write_shard(place.draft, layout, values_of(layout, snapshot.entries), snapshot.blobs)


def _publish(
    place: Place, names: Sequence[str], records: Sequence[FileRecord], contents: Contents | None
) -> None:
    """Only the first rank has ``contents``, and acts."""
    if contents is not None:
        publish(place, dict(zip(names, records, strict=True)), contents)
