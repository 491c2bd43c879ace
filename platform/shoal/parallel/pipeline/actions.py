"""What a stage does in a step, one after the other, as plain values.

    receive activation ─► forward ─► send activation      of every chunk but the first / the last
    receive gradient  ─► backward ─► send gradient        of every chunk but the last / the first

A receive begins one computation before the one that needs it, so that a message travels while the
stage computes. Messages between two chunks arrive in the order in which they were sent, so the
order of receives must be that of sends: it is, because all stages take microbatches in one order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from shoal.parallel.pipeline.stages import Stages
from shoal.parallel.pipeline.timeline import Computation, Direction, Timeline


class ActionKind(StrEnum):
    """Kinds of what a stage does."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECEIVE_ACTIVATION = "receive_activation"
    """Begin to receive what the chunk's forward takes."""
    SEND_ACTIVATION = "send_activation"
    """Begin to send what the chunk's forward made."""
    RECEIVE_GRADIENT = "receive_gradient"
    """Begin to receive what the chunk's backward takes."""
    SEND_GRADIENT = "send_gradient"
    """Begin to send what the chunk's backward made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One thing that a stage does with one microbatch in one chunk."""

    kind: ActionKind
    microbatch: int
    chunk: int
    """Number of the chunk in the whole model."""


def actions_of(timeline: Timeline, stage: int) -> tuple[Action, ...]:
    """All that one stage does in a step, in order."""
    return tuple(_with_messages(timeline.stages, timeline.orders[stage]))


def _with_messages(stages: Stages, order: Sequence[Computation]) -> Iterator[Action]:
    yield from _receives(stages, order[:1])
    for index, computation in enumerate(order):
        yield from _receives(stages, order[index + 1 : index + 2])
        forward = computation.direction is Direction.FORWARD
        yield _action(ActionKind.FORWARD if forward else ActionKind.BACKWARD, computation)
        if forward and not stages.is_last(computation.chunk):
            yield _action(ActionKind.SEND_ACTIVATION, computation)
        if not forward and not stages.is_first(computation.chunk):
            yield _action(ActionKind.SEND_GRADIENT, computation)


def _receives(stages: Stages, following: Sequence[Computation]) -> Iterator[Action]:
    for computation in following:
        forward = computation.direction is Direction.FORWARD
        if forward and not stages.is_first(computation.chunk):
            yield _action(ActionKind.RECEIVE_ACTIVATION, computation)
        if not forward and not stages.is_last(computation.chunk):
            yield _action(ActionKind.RECEIVE_GRADIENT, computation)


def _action(kind: ActionKind, computation: Computation) -> Action:
    return Action(kind=kind, microbatch=computation.microbatch, chunk=computation.chunk)
