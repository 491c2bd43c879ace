"""Saving: write under a temporary name, agree that all is well, publish under the step's name.

    all ranks    first rank
        ├─ agree ── no such step yet, room on the disk, leftovers deleted, temporary folder made
        ├─ write ── one file a rank, hashed and flushed
        ├─ agree ── every rank wrote: otherwise the folder goes and every rank raises
        │  publish  attachments, DCP metadata, manifest; flush, rename, flush
        └─ agree ── published: otherwise the folder goes and every rank raises

A step is published whole or not at all. A killed save leaves a temporary folder of its own name,
which nobody reads and the next save deletes.
"""

from __future__ import annotations

import logging
import pickle
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch
import torch.distributed as dist
from torch import nn

from shoal.checkpoint.catalog import clean, hidden_name, new_token, step_name
from shoal.checkpoint.files import FileRecord, flush_folder, write_file
from shoal.checkpoint.manifest import Manifest, OptimizerRecord
from shoal.checkpoint.peers import Peers
from shoal.checkpoint.shard import Shard, metadata_of, write_shard
from shoal.checkpoint.snapshot import Snapshot, take_snapshot
from shoal.checkpoint.verify import damages
from shoal.errors import WorkError

logger = logging.getLogger(__name__)

ATTACHMENTS = "attachments"
"""Folder of a checkpoint for files that travel with it."""

METADATA_NAME = ".metadata"
"""Where DCP looks for its metadata."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A checkpoint just published."""

    step: int
    """Steps taken when it was saved."""

    path: Path
    """Its folder."""

    num_bytes: int
    """Bytes of tensors that all ranks wrote."""

    seconds: float
    """How long this rank was busy with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What one rank reports to the one that publishes."""

    shard: Shard
    optimizer_kind: str | None
    stateless: frozenset[str]


def save(
    folder: Path,
    step: int,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    counters: Mapping[str, object],
    rng: Mapping[str, torch.Tensor] | None = None,
    attachments: Mapping[str, Path | bytes] | None = None,
    group: dist.ProcessGroup | None = None,
) -> Saved:
    """Save a run's state as ``folder/step-<step>``; every rank of ``group`` calls it alike.

    ``folder`` holds the run's checkpoints and is seen by every rank. ``counters`` are plain values
    (numbers, texts, containers, tensors), equal on every rank. ``rng`` is this rank's, from
    ``capture_rng``. ``attachments`` maps names inside the checkpoint's ``attachments`` folder to
    contents or to files to copy; the first rank's are taken. Settings of the optimizer such as
    learning rates are not saved: they follow from the configuration and the counters. ``group``
    unset is the default group or, outside of any, this process alone.

    Raises WorkError on every rank, at the latest after the group's timeout, where any rank fails:
    nothing is published then, and earlier steps stay as they were. A complete step of the same
    number is refused; a damaged one is moved aside.
    """
    start = time.monotonic()
    peers = Peers(group)
    deed = f"Saving {folder / step_name(step)}"
    snapshot = peers.each(
        deed,
        lambda: take_snapshot(
            model=model, optimizer=optimizer, counters=counters, rng=rng, rank=peers.rank
        ),
    )
    num_bytes = sum(peers.share(deed, snapshot.num_bytes))
    token = peers.share(deed, new_token())[0]
    temporary = folder / hidden_name(step, "tmp", token)
    published = False
    try:
        peers.each(deed, lambda: _prepare(folder, step, num_bytes, temporary, peers))
        part = peers.each(deed, lambda: _write(temporary, snapshot, peers))
        parts = peers.gather(deed, part)
        peers.each(deed, lambda: _publish(folder, step, temporary, parts, attachments or {}))
        published = True
    finally:
        if peers.first and not published:
            shutil.rmtree(temporary, ignore_errors=True)
    return Saved(
        step=step,
        path=folder / step_name(step),
        num_bytes=num_bytes,
        seconds=time.monotonic() - start,
    )


def _prepare(folder: Path, step: int, num_bytes: int, temporary: Path, peers: Peers) -> None:
    """Make the temporary folder, after all that can be refused before a byte is written."""
    if not peers.first:
        return
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / step_name(step)
    if final.exists():
        _move_aside(final, step)
    clean(folder)
    room = shutil.disk_usage(folder)
    if room.total and room.free < num_bytes:
        raise WorkError(
            f"{folder} has no room for step {step}: it takes {num_bytes:,} bytes and "
            f"{room.free:,} are free. Free some, lower checkpoint.keep, or move run.dir."
        )
    temporary.mkdir()


def _move_aside(final: Path, step: int) -> None:
    problems = damages(final, step=step)
    if not problems:
        raise WorkError(f"{final} is a complete checkpoint already and is not written again.")
    aside = final.with_name(hidden_name(step, "bad", new_token()))
    logger.warning("%s is moved to %s: %s", final, aside, problems[0])
    final.rename(aside)


def _write(temporary: Path, snapshot: Snapshot, peers: Peers) -> _Part:
    if not temporary.is_dir():
        raise WorkError(
            f"Rank {peers.rank} does not see {temporary}: every node must share the run's folder."
        )
    shard = write_shard(temporary, peers.rank, snapshot.entries, snapshot.blobs)
    flush_folder(temporary)
    return _Part(shard=shard, optimizer_kind=snapshot.optimizer_kind, stateless=snapshot.stateless)


def _publish(
    folder: Path,
    step: int,
    temporary: Path,
    parts: Sequence[_Part],
    attachments: Mapping[str, Path | bytes],
) -> None:
    """Complete the folder and give it its name; only the first rank has ``parts``, and acts."""
    if not parts:
        return
    shards = [part.shard for part in parts]
    files = {shard.name: shard.record for shard in shards}
    files |= _attach(temporary, attachments)
    files[METADATA_NAME] = write_file(temporary / METADATA_NAME, pickle.dumps(metadata_of(shards)))
    manifest = Manifest(
        step=step,
        world_size=len(parts),
        optimizer=_optimizer_record(parts),
        files=dict(sorted(files.items())),
    )
    manifest.write(temporary)
    problems = damages(temporary, step=step)
    if problems:
        raise WorkError(f"{problems[0]} right after it was written.")
    flush_folder(temporary)
    temporary.rename(folder / step_name(step))
    flush_folder(folder)


def _optimizer_record(parts: Sequence[_Part]) -> OptimizerRecord | None:
    kind = parts[0].optimizer_kind
    if kind is None:
        return None
    stateless = frozenset[str]().union(*(part.stateless for part in parts))
    return OptimizerRecord(kind=kind, stateless=tuple(sorted(stateless)))


def _attach(temporary: Path, attachments: Mapping[str, Path | bytes]) -> dict[str, FileRecord]:
    records = {}
    for name, content in attachments.items():
        place = PurePosixPath(ATTACHMENTS, name)
        if PurePosixPath(name).is_absolute() or ".." in place.parts:
            raise WorkError(f"{name} is no name for a file inside a checkpoint.")
        target = temporary / place
        target.parent.mkdir(parents=True, exist_ok=True)
        data = content if isinstance(content, bytes) else content.read_bytes()
        records[str(place)] = write_file(target, data)
        flush_folder(target.parent)
    return records
