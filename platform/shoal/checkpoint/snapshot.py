"""What one rank has to write of a run's state at one moment."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.checkpoint.entry import (
    Entry,
    buffer_entries,
    held_parameters,
    optimizer_entries,
    rng_entries,
    stateless_names,
    weight_entries,
)
from shoal.checkpoint.shard import Blob, pack
from shoal.checkpoint.state import State


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The rows for which this rank stands.

    Weights and moments are the live ones, which only an optimizer's step changes. Buffers and
    generators are copies: a forward pass may change them.
    """

    entries: tuple[Entry, ...]
    """Tensors to write."""

    blobs: tuple[Blob, ...]
    """Other values to write."""

    optimizer_kind: str | None
    """Class of the optimizer; unset without one."""

    stateless: frozenset[str]
    """Parameters for whose first rows this rank stands and that have no optimizer state."""


def take_snapshot(state: State, *, rank: int, num_ranks: int) -> Snapshot:
    """Collect what this rank writes: its rows, its generators, on the first rank the rest.

    Raises WorkError for state that a checkpoint cannot keep.
    """
    first = rank == 0
    model, optimizer = state.model, state.optimizer
    parameters = held_parameters(model, rank=rank, num_ranks=num_ranks)
    entries = weight_entries(parameters)
    entries += buffer_entries(model, entries, first_rank=first, copies=True)
    if optimizer is not None:
        entries += optimizer_entries(optimizer, parameters)
    written = [part for entry in entries if (part := entry.written) is not None]
    return Snapshot(
        entries=(*written, *rng_entries(state.rng or {}, rank)),
        blobs=(pack(("counters",), dict(state.counters)),) if first else (),
        optimizer_kind=None if optimizer is None else type(optimizer).__name__,
        stateless=stateless_names(optimizer, parameters) if optimizer is not None else frozenset(),
    )
