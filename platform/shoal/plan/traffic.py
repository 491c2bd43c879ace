"""Collectives of one step as each rank takes part in them, counted and in bytes.

With M microbatches every unit brings its weights together twice a microbatch (forward, backward)
where they rest in parts, and once a step where only their optimizer state is in parts; gradients
are reduced after each microbatch as far as they rest in parts, and the rest of the way once. Muon
brings the updates of matrices together, and what it makes of them back, once a step.
Where ranks share experts, every visit of a layer's tokens to them takes one small all-gather of
counts, and an all-to-all there and one back; backward takes both ways again, and recomputation
repeats the forward. Where biases of experts are updated, their tokens are added up over the ranks
of a stage, once a step. The few scalars of the loss and of the gradient's norm are left out.

Between stages each microbatch sends what a chunk made to the next one, and the gradient back; the
table of a tied head costs one message of gradients each way.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from shoal.fsdp.ledger import Operation
from shoal.plan.group import Group, Layers, counted
from shoal.plan.moves import Move
from shoal.topology import MESH_AXES, Axis

What = Literal[
    "weights",
    "gradients",
    "updates",
    "activations",
    "gradients of activations",
    "keys and values",
    "gradients of keys and values",
    "visits of experts",
    "loads of experts",
    "tokens",
    "counts",
]

When = Literal["each microbatch", "once a step"]

COUNT_BYTES = 8
"""Of the number of rows, or of tokens, for one expert."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """Collectives, or messages, of one kind."""

    stage: int
    """Pipeline stage whose ranks take part, or send."""

    layers: Layers
    what: What
    operation: Operation

    axis: str
    """``outer`` or ``inner``; ``context`` or ``expert`` for what ranks share in a layer;
    ``pipeline`` for messages."""

    group_size: int
    """Ranks that take part."""

    when: When = "each microbatch"
    """How often; what happens once a step can wait for one microbatch's compute only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The collectives of one kind in a step."""

    stream: Stream

    count: int
    """Collectives in a step."""

    payload_bytes: int
    """Bytes of their larger sides together: what is gathered, what is reduced, or what goes from
    one rank to others. How many tokens visit which expert is known in the run only, and of a
    sequence that does not divide some ranks have one token more: what depends on either is the mean
    over a stage's ranks, rounded up."""

    @property
    def sent_bytes(self) -> int:
        """Bytes that each rank has to send at least."""
        if self.stream.operation == "all_to_all" and self.stream.axis == Axis.CONTEXT.value:
            return self.payload_bytes  # handed on in a ring: nothing of it stays
        if self.stream.operation == "send":
            return self.payload_bytes  # nothing of it stays
        passes = 2 if self.stream.operation == "all_reduce" else 1
        size = self.stream.group_size
        return passes * self.payload_bytes * (size - 1) // size


def step_traffic(
    groups: Sequence[Group], num_microbatches: int, *, stage: int = 0
) -> tuple[Traffic, ...]:
    """Everything that one rank's step moves inside its stage, equal kinds together."""
    counts: dict[Stream, int] = defaultdict(int)
    payloads: dict[Stream, int] = defaultdict(int)
    for group, number in counted(groups):
        for what, times, move in _moves(group, num_microbatches):
            stream = Stream(
                stage=stage,
                layers=group.layers,
                what=what,
                operation=move.operation,
                axis=MESH_AXES[move.axis],
                group_size=group.sizes[move.axis],
                when="once a step" if times == 0 else "each microbatch",
            )
            counts[stream] += number * max(times, 1)
            payloads[stream] += number * max(times, 1) * move.payload_bytes
    return tuple(
        Traffic(stream=stream, count=counts[stream], payload_bytes=payloads[stream])
        for stream in counts
    )


def expert_traffic(
    *,
    stage: int = 0,
    degree: int,
    num_experts: int,
    num_visits: int,
    row_bytes: Fraction,
    recompute: bool,
) -> tuple[Traffic, ...]:
    """What ``degree`` ranks that share experts move in a step.

    Args:
        num_visits: Of sparse layers in forward, over all microbatches.
        row_bytes: Of what a rank's tokens of one microbatch take to their experts, in the mean.
        recompute: Whether backward computes the forward again.
    """
    forwards = 2 if recompute else 1
    counts, ways = num_visits * forwards, num_visits * (2 * forwards + 2)
    return (
        Traffic(
            stream=_expert_stream(stage, "counts", "all_gather", degree),
            count=counts,
            payload_bytes=counts * degree * num_experts * COUNT_BYTES,
        ),
        Traffic(
            stream=_expert_stream(stage, "tokens", "all_to_all", degree),
            count=ways,
            payload_bytes=math.ceil(ways * row_bytes),
        ),
    )


def load_traffic(*, stage: int, sizes: dict[Axis, int], num_loads: int) -> Iterator[Traffic]:
    """What adds up ``num_loads`` numbers of tokens over axes of ``sizes`` ranks, once a step."""
    for axis, size in sizes.items():
        if size > 1 and num_loads:
            stream = Stream(
                stage=stage,
                layers="dense",
                what="loads of experts",
                operation="all_reduce",
                axis=axis.value,
                group_size=size,
                when="once a step",
            )
            yield Traffic(stream=stream, count=1, payload_bytes=num_loads * COUNT_BYTES)


def _expert_stream(stage: int, what: What, operation: Operation, degree: int) -> Stream:
    axis = Axis.EXPERT.value
    return Stream(
        stage=stage, layers="expert", what=what, operation=operation, axis=axis, group_size=degree
    )


def _moves(group: Group, num_microbatches: int) -> Iterator[tuple[What, int, Move]]:
    """What moves, how often in a step if for each microbatch, else 0, and the collective."""
    for move in group.refresh_moves():
        yield "weights", 0, move
    for move in (*group.forward_moves(), *group.backward_moves()):
        yield "weights", num_microbatches, move
    for move in group.microbatch_moves():
        yield "gradients", num_microbatches, move
    for move in group.final_moves(num_microbatches):
        yield "gradients", 0, move
    for move in group.update_moves():
        yield "updates", 0, move
