"""Collectives of one step as each rank takes part in them, counted and in bytes.

With M microbatches every unit brings its weights together twice a microbatch (forward, backward)
where they rest in parts, and once a step where only their optimizer state is in parts; gradients
are reduced after each microbatch as far as they rest in parts, and the rest of the way once.
The few scalars of the loss and of the gradient's norm are left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from shoal.plan.group import Deed, Group, Layers, Move
from shoal.topology import MESH_AXES

What = Literal["weights", "gradients"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """Collectives of one kind."""

    layers: Layers
    what: What
    deed: Deed

    axis: str
    """``outer`` or ``inner``."""

    group_size: int
    """Ranks that take part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The collectives of one kind in a step."""

    stream: Stream

    count: int
    """Collectives in a step."""

    payload_bytes: int
    """Bytes of their larger sides together: what is gathered, or what is reduced."""

    @property
    def sent_bytes(self) -> int:
        """Bytes that each rank has to send at least."""
        passes = 2 if self.stream.deed == "all_reduce" else 1
        size = self.stream.group_size
        return passes * self.payload_bytes * (size - 1) // size


def step_traffic(groups: Sequence[Group], num_microbatches: int) -> tuple[Traffic, ...]:
    """Everything that one rank's step moves, equal kinds together."""
    counts: dict[Stream, int] = defaultdict(int)
    payloads: dict[Stream, int] = defaultdict(int)
    for group in groups:
        for what, times, move in _moves(group, num_microbatches):
            stream = Stream(
                layers=group.layers,
                what=what,
                deed=move.deed,
                axis=MESH_AXES[move.axis],
                group_size=group.sizes[move.axis],
            )
            counts[stream] += times
            payloads[stream] += times * move.payload_bytes
    return tuple(
        Traffic(stream=stream, count=counts[stream], payload_bytes=payloads[stream])
        for stream in counts
    )


def _moves(group: Group, num_microbatches: int) -> Iterator[tuple[What, int, Move]]:
    """What moves, how often in a step, and the collective."""
    for move in group.refresh_moves():
        yield "weights", 1, move
    for move in group.gather_moves():
        yield "weights", 2 * num_microbatches, move
    for move in group.microbatch_moves():
        yield "gradients", num_microbatches, move
    for move in group.final_moves(num_microbatches):
        yield "gradients", 1, move
