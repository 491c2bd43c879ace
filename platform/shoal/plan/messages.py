"""What the stages of a pipeline send each other in a step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction

from shoal.fsdp.ledger import Operation
from shoal.models import DecoderConfig
from shoal.parallel.pipeline import Stages
from shoal.plan.activations import FP32_BYTES
from shoal.plan.batches import Batches
from shoal.plan.group import Group
from shoal.plan.traffic import Stream, Traffic, What, When

SEND: Operation = "send"


def boundary_sizes(
    config: DecoderConfig, batches: Batches, hidden: Fraction
) -> tuple[Fraction, ...]:
    """Bytes of each tensor that one microbatch takes from chunk to chunk.

    The first is the hidden state, of ``hidden`` bytes: a mean where ranks share sequences that do
    not divide. Of a decoder with experts come their visits
    and the sums of their probabilities, of which all but the visits have a gradient.
    """
    if not any(config.sparse_layers):
        return (hidden,)
    assert config.experts is not None
    sums = Fraction(batches.micro_batch * config.experts.num_experts * FP32_BYTES)
    return (hidden, sums, sums)


def stage_messages(
    stages: Stages, stage: int, sizes: Sequence[Fraction], num_microbatches: int
) -> Iterator[Traffic]:
    """What each rank of a stage sends to its neighbours; ``sizes`` are those of the boundary."""
    chunks = stages.chunks_of(stage)
    forth = sum(not stages.is_last(chunk) for chunk in chunks) * num_microbatches
    back = sum(not stages.is_first(chunk) for chunk in chunks) * num_microbatches
    if forth:
        yield _traffic(stage, "activations", forth, sizes)
    if back:
        yield _traffic(stage, "gradients of activations", back, [sizes[0], *sizes[2:]])


def tied_message(stage: int, table: Group) -> Traffic:
    """What a rank of either end sends the other of the gradients of a tied table."""
    return _traffic(stage, "gradients", 1, [Fraction(table.gradient_bytes)], "once a step")


def _traffic(
    stage: int,
    what: What,
    times: int,
    sizes: Sequence[Fraction],
    when: When = "each microbatch",
) -> Traffic:
    stream = Stream(
        stage=stage,
        layers="dense",
        what=what,
        operation=SEND,
        axis="pipeline",
        group_size=2,
        when=when,
    )
    payload = math.ceil(times * sum(sizes))
    return Traffic(stream=stream, count=times * len(sizes), payload_bytes=payload)
