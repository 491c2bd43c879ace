"""Loading: any number of ranks and any placement read what any other wrote.

    all ranks
        ├─ look  ── the manifest, the index, the size of every file
        ├─ fit   ── what is wanted here against what is there: missing and unread keys are refused
        ├─ read  ── each rank its own rows, in place, with the checksums of the blocks they lie in
        └─ sync  ── main weights to compute weights

Each stage ends in an agreement, so that all ranks go on or all raise.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shoal.checkpoint.entry import (
    Entry,
    buffer_entries,
    held_parameters,
    model_keys,
    optimizer_entries,
    optimizer_name,
    weight_entries,
)
from shoal.checkpoint.fit import Fit, some
from shoal.checkpoint.index import INDEX_NAME
from shoal.checkpoint.moments import Reading, as_saved
from shoal.checkpoint.optimizer_state import initialize_state
from shoal.checkpoint.peers import Peers
from shoal.checkpoint.reading import CheckpointReader
from shoal.errors import WorkError
from shoal.fsdp import ShardedParameter, sync_weights
from shoal.storage import Damage, Location, Manifest, block_damages, damages

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a checkpoint held beside weights and moments."""

    step: int
    """Steps taken when it was saved."""

    counters: dict[str, Any]
    """The counters as they were saved."""

    rng: dict[str, torch.Tensor] | None
    """This rank's generators; unset where another number of ranks saved, or none were saved."""


def load(
    path: Location,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    allow: Collection[str] = (),
    group: dist.ProcessGroup | None = None,
) -> Loaded:
    """Fill a model and its optimizer from a checkpoint; every rank of ``group`` calls it alike.

    Weights, moments and steps become bit-equal to the saved ones, whatever layout saved them; where
    a format differs, of floating point or a moment's in 8 bits, values are converted. The
    optimizer's state need not exist: it is created first. ``optimizer`` unset loads the weights
    alone. ``allow`` names keys, as patterns such as ``optimizer.*.max_exp_avg_sq``, that may be in
    the checkpoint unread, or wanted and missing; what is missing keeps its initial value.

    Raises WorkError on every rank where the checkpoint is damaged or cannot be read, and
    ConfigError where it does not fit: keys missing or unread, other shapes or kinds of numbers.
    A refusal leaves the weights as they were, and the optimizer with state that it just created.
    Only where it comes while rows are read, as from a block that does not match its checksum, some
    are in place already: then all that was to be read becomes NaN on every rank, so that nobody
    computes with half of a checkpoint. Load another step then.
    """
    peers = Peers(group)
    deed = f"Loading {path}"
    host = socket.gethostname()
    reader, hosts = peers.tell(deed, lambda: (_look(path, is_first=peers.first), host))
    manifest = reader.manifest
    fit = Fit(
        path=path,
        stored=reader.keys,
        stateless=manifest.optimizer.stateless if manifest.optimizer else (),
        allow=allow,
    )
    parameters = held_parameters(model, rank=peers.rank, num_ranks=peers.size)
    if optimizer is not None and manifest.optimizer is None:
        raise fit.unfit("it holds no optimizer state", "Start anew from its weights alone")

    def check() -> tuple[Reading, bytes]:
        reading = as_saved(_entries(model, optimizer, parameters), reader.keys)
        wanted = model_keys(model, parameters) | {entry.key for entry in reading.entries}
        fit.check(reading.entries, wanted)
        return reading, _mask(reader.keys, wanted)

    reading, masks = peers.tell(deed, check)
    entries = reading.entries
    fit.check_unread(_union(reader.keys, masks), with_optimizer=optimizer is not None)
    found = [entry for entry in entries if entry.key in reader.keys]
    try:
        sharers = hosts.count(host)
        loaded = peers.each(deed, lambda: _read(reader, found, manifest, peers, sharers))
    except WorkError:
        _spoil(found)
        sync_weights(model)
        raise
    reading.finish()
    if optimizer is not None:
        _forget(optimizer, parameters, entries, found)
    sync_weights(model)
    return loaded


def _look(path: Location, *, is_first: bool) -> CheckpointReader:
    """The cheap checks, and on the first rank those of what lies beside the ranks' files."""
    _refuse(path, damages(path))
    reader = CheckpointReader(path)
    if is_first:
        beside = dict.fromkeys(reader.manifest.files.keys() - reader.files - {INDEX_NAME})
        _refuse(path, block_damages(path, reader.manifest, beside))
    return reader


def _refuse(path: Location, problems: Sequence[Damage]) -> None:
    if problems:
        raise WorkError(f"{problems[0]}: {path} is damaged. Load another step.")


def _rng_keys(reader: CheckpointReader, peers: Peers) -> list[str]:
    """Keys of this rank's generators."""
    return [key for key in reader.keys if reader.path(key)[:2] == ("rng", str(peers.rank))]


def _entries(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    parameters: Sequence[ShardedParameter],
) -> list[Entry]:
    """All that this rank has to fill."""
    entries = weight_entries(parameters)
    entries += buffer_entries(model, entries, first_rank=False, copies=False)
    if optimizer is not None:
        initialize_state(optimizer, parameters)
        entries += optimizer_entries(optimizer, parameters)
    return entries


def _mask(stored: Collection[str], wanted: Collection[str]) -> bytes:
    """One byte for each key of the checkpoint, in sorted order: much smaller than the keys."""
    return bytes(key in wanted for key in sorted(stored))


def _union(stored: Collection[str], masks: Sequence[bytes]) -> set[str]:
    """Keys of the checkpoint that any rank wants."""
    wanted = [any(flags) for flags in zip(*masks, strict=True)]
    return {key for key, flag in zip(sorted(stored), wanted, strict=True) if flag}


def _read(
    reader: CheckpointReader,
    entries: Sequence[Entry],
    manifest: Manifest,
    peers: Peers,
    sharers: int,
) -> Loaded:
    reader.fill(entries, sharers=sharers)
    rng = {reader.path(key)[2]: reader.tensor(key) for key in _rng_keys(reader, peers)}
    same_ranks = manifest.world_size == peers.size
    return Loaded(
        step=manifest.step,
        counters=reader.value("counters"),
        rng=rng if rng and same_ranks else None,
    )


def _spoil(entries: Sequence[Entry]) -> None:
    """Have nobody take half of a checkpoint for a whole one."""
    logger.error("Weights and moments are not a number now: a checkpoint was read in part.")
    for entry in entries:
        if entry.local.is_floating_point():
            entry.local.fill_(torch.nan)


def _forget(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[ShardedParameter],
    entries: Sequence[Entry],
    found: Sequence[Entry],
) -> None:
    """Drop the state of parameters that had none when they were saved: it starts anew."""
    fresh = _stateful(entries) - _stateful(found)
    for parameter in parameters:
        if optimizer_name(parameter) in fresh:
            del optimizer.state[parameter.local]
    if fresh:
        logger.warning("No optimizer state was saved for %s: theirs starts anew.", some(fresh))


def _stateful(entries: Sequence[Entry]) -> set[str]:
    return {entry.path[1] for entry in entries if entry.path[0] == "optimizer"}
