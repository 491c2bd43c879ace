"""Rewriting a checkpoint for another layout, by one process that never holds the state.

    for each rank of the new layout
        rows ── a few chunks at a time ──► the rank's file
    publish ── compare with the source, again a few chunks at a time

Any layout loads a checkpoint as it is. Of a rewritten one each rank reads a single file, in order,
and it is the file which that rank would write itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from shoal.checkpoint.contents import ATTACHMENTS, descriptions
from shoal.checkpoint.entry import (
    Entry,
    entries_of_buffers,
    rng_entries,
    state_entries,
    weight_entries,
)
from shoal.checkpoint.fit import some
from shoal.checkpoint.index import Chunk, StoredTensor
from shoal.checkpoint.reading import CheckpointReader
from shoal.checkpoint.shard import CHUNK_BYTES, Blob, Layout, lay_out, write_shard
from shoal.errors import ConfigError, WorkError
from shoal.fsdp import ShardedParameter
from shoal.storage import (
    Contents,
    FileRecord,
    Location,
    Manifest,
    Place,
    discard,
    medium_of,
    new_token,
    prepare,
    publish,
    verify,
)

_COUNTERS = "counters"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What one rank of the new layout would write."""

    entries: tuple[Entry, ...]
    """Without memory."""
    blobs: tuple[Blob, ...]
    layout: Layout


def reshard(
    source: Location,
    folder: Location,
    held: Sequence[Sequence[ShardedParameter]],
    buffers: Mapping[str, torch.Size],
) -> Location:
    """Write the checkpoint ``source`` into ``folder`` as the ranks of another layout would.

    ``held`` is what each of them holds, without memory (``shoal.plan.held_by_rank``), ``buffers``
    the shape of each buffer of the model (``shoal.plan.buffers_of``). Values keep their formats and
    their bits; generators stay where the number of ranks does, for they are the ranks' own. Memory
    is that of a few chunks of 64 MiB, and of the index. Returns the new step's folder, whose values
    were compared with those of ``source``. The caller holds the run's lock.

    Raises WorkError where ``source`` is damaged, the disk refuses or the step is there already, and
    ConfigError where the layout's model is another.
    """
    problems = verify(source)
    if problems:
        raise WorkError(f"{problems[0]}: {source} is damaged. Take another step.")
    manifest, reader = Manifest.read(source), CheckpointReader(source)
    wanted = {each.name: each.shape for parameters in held for each in parameters}
    _check(source, reader, {**wanted, **buffers})
    kept = {
        key
        for key in reader.keys
        if reader.path(key)[0] != "rng" or manifest.world_size == len(held)
    }
    leaders = _leaders(wanted, buffers)
    parts = [_part(reader, kept, rank, parameters, leaders) for rank, parameters in enumerate(held)]
    place = Place(folder=folder, step=manifest.step, token=new_token())
    prepare(place, sum(part.layout.shard.num_bytes for part in parts))
    try:
        records = {part.layout.shard.name: _write(place, reader, part) for part in parts}
        publish(place, records, _contents(source, manifest, parts))
    except BaseException:
        discard(place.draft)
        raise
    different = _difference(kept, reader, CheckpointReader(place.final))
    if different is not None:
        medium_of(folder).remove(place.final)
        raise WorkError(f"{place.final}: {different} is not as in {source}. Nothing is left of it.")
    return place.final


def _check(source: Location, reader: CheckpointReader, shapes: Mapping[str, torch.Size]) -> None:
    """Refuse a layout of another model."""
    wanted = {f"model.{name}": shape for name, shape in shapes.items()}
    stored = {key: _tensor(reader, key).shape for key in reader.keys if key.startswith("model.")}
    different = {key for key in wanted | stored if wanted.get(key) != stored.get(key)}
    if different:
        raise ConfigError(
            "model",
            str(source),
            f"{some(different)} of this checkpoint and of the configuration's model differ",
            "Give the configuration of the run that saved it, with another layout",
        )


def _leaders(parameters: Iterable[str], buffers: Iterable[str]) -> dict[str, str]:
    """The first parameter of each buffer's module; ``parameters`` are in the model's order."""
    firsts: dict[str, str] = {}
    for name in parameters:
        firsts.setdefault(name.rpartition(".")[0], name)
    return {name: firsts[name.rpartition(".")[0]] for name in buffers}


def _part(
    reader: CheckpointReader,
    kept: Collection[str],
    rank: int,
    parameters: Sequence[ShardedParameter],
    leaders: Mapping[str, str],
) -> _Part:
    """Lay out one rank's file, as ``take_snapshot`` would have it."""
    parameters = [_as_stored(reader, parameter) for parameter in parameters]
    states, weights = _states(reader, parameters), weight_entries(parameters)
    buffers = {name: reader.entry(f"model.{name}", device="meta").local for name in leaders}
    entries = weights + entries_of_buffers(buffers, leaders, weights, first_rank=rank == 0)
    entries += state_entries(states, parameters)
    generators = {
        reader.path(key)[2]: reader.entry(key, device="meta").local
        for key in kept
        if reader.path(key)[:2] == ("rng", str(rank))
    }
    written = (
        *(part for entry in entries if (part := entry.written) is not None),
        *rng_entries(generators, rank),
    )
    blobs = [Blob(path=(_COUNTERS,), data=reader.blob(_COUNTERS))] if rank == 0 else []
    return _Part(entries=written, blobs=tuple(blobs), layout=lay_out(rank, written, blobs))


def _states(
    reader: CheckpointReader, parameters: Sequence[ShardedParameter]
) -> dict[torch.Tensor, dict[str, object]]:
    """The optimizer's state of the rows held by one rank, without memory."""
    locals_of = {parameter.name: parameter.local for parameter in parameters}
    states: dict[torch.Tensor, dict[str, object]] = {}
    for key in reader.keys:
        kind, *rest = reader.path(key)
        if kind == "optimizer" and rest[0] in locals_of:
            local, stored = locals_of[rest[0]], _tensor(reader, key)
            sizes = (len(local), *stored.shape[1:]) if stored.shape else ()
            value = torch.empty(sizes, dtype=stored.dtype, device="meta")
            states.setdefault(local, {})[rest[1]] = value
    return states


def _as_stored(reader: CheckpointReader, parameter: ShardedParameter) -> ShardedParameter:
    """In the format that it was saved in."""
    dtype = _tensor(reader, f"model.{parameter.name}").dtype
    return replace(parameter, local=nn.Parameter(parameter.local.detach().to(dtype)))


def _contents(source: Location, manifest: Manifest, parts: Sequence[_Part]) -> Contents:
    described = descriptions([part.layout.shard for part in parts])
    attachments = [name for name in manifest.files if name.startswith(f"{ATTACHMENTS}/")]
    return Contents(files=described, optimizer=manifest.optimizer).beside(
        {name: source / name for name in attachments}
    )


def _write(place: Place, reader: CheckpointReader, part: _Part) -> FileRecord:
    values = (entry.local for entry in _filled(reader, _slots(part)))
    return write_shard(place.draft, part.layout, values, part.blobs)


def _slots(part: _Part) -> Iterator[Entry]:
    """What goes into the slots of a file, in their order, without memory."""
    for slot in part.layout.slots:
        entry = part.entries[slot.entry]
        if slot.rows is None:
            yield entry
        else:
            start = entry.row_start + slot.rows.start
            yield replace(entry, row_start=start, local=entry.local[slot.rows])


def _filled(reader: CheckpointReader, entries: Iterable[Entry]) -> Iterator[Entry]:
    """The entries with their values; only about ``CHUNK_BYTES`` of them have memory at a time."""
    batch: list[Entry] = []
    num_bytes = 0
    for entry in entries:
        if batch and num_bytes + entry.local.nbytes > CHUNK_BYTES:
            reader.fill(batch)
            yield from batch
            batch, num_bytes = [], 0
        batch.append(replace(entry, local=torch.empty_like(entry.local, device="cpu")))
        num_bytes += entry.local.nbytes
    reader.fill(batch)
    yield from batch


def _difference(
    kept: Collection[str], source: CheckpointReader, made: CheckpointReader
) -> str | None:
    """The first key under which two checkpoints do not hold the same bits."""
    if missing := made.keys.keys() ^ kept:
        return some(missing)
    chunks = [
        replace(made.entry(key, device="meta"), row_start=chunk.row_start, local=rows)
        for key, stored in made.keys.items()
        if isinstance(stored, StoredTensor)
        for chunk in stored.chunks
        for rows in [_rows(stored, chunk)]
    ]
    pairs = zip(_filled(source, chunks), _filled(made, chunks), strict=True)
    for left, right in pairs:
        if not torch.equal(_bytes(left.local), _bytes(right.local)):
            return left.key
    return None if source.blob(_COUNTERS) == made.blob(_COUNTERS) else _COUNTERS


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _rows(stored: StoredTensor, chunk: Chunk) -> torch.Tensor:
    sizes = (chunk.row_stop - chunk.row_start, *stored.shape[1:]) if stored.shape else ()
    return torch.empty(sizes, dtype=stored.dtype, device="meta")


def _tensor(reader: CheckpointReader, key: str) -> StoredTensor:
    stored = reader.keys[key]
    if not isinstance(stored, StoredTensor):
        raise WorkError(f"{key} is no tensor.")
    return stored
