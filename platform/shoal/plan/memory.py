"""Bytes that each rank needs, by kind.

At rest, between two steps, stand the flat buffers of every group (``Group``), the moments, and the
biases that choose experts, which are buffers of their layers. In a step come on top, as far as they
exist at its fullest moment (``shoal.plan.moments``):

    whole weights   those of a unit in use, of the units around it, and of the next one on its way
    contributions   what backward makes, full size in the compute format: of the same units, one
                    being made while its neighbour's is reduced, with what peers send
    accumulation    sums over microbatches, where they cannot use the memory of the gradients
    activations     see ``shoal.plan.activations``; in a pipeline, of all microbatches in flight,
                    and messages that may still be on their way
    head            a chunk of logits and the gradients that the loss computes ahead; that of a
                    table which is the embedding's too waits for the embedding's
    exchange        rows on their way to experts that ranks share, of an even routing; keys and
                    values of a layer, with their gradients, among ranks that share sequences
    update          what the optimizer's arithmetic takes, when all of the above is gone
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch

from shoal.config import OptimizerSettings
from shoal.models import DecoderConfig
from shoal.ops import eight_bit
from shoal.plan.activations import FP32_BYTES
from shoal.plan.group import Group
from shoal.plan.precision import Precision

BUCKET_ELEMENTS = 2**22
"""Elements that optimizers of unlike formats update at a time: bounds their fp32 temporaries to a
few times 16 MiB."""

_CODING_ARRAYS = 6
"""Words of 4 bytes for each element that is being brought to 8 bits."""


class Kind(StrEnum):
    """What bytes are for."""

    MAIN_WEIGHTS = "main_weights"
    COMPUTE_WEIGHTS = "compute_weights"
    GRADIENTS = "gradients"
    MOMENTS = "moments"
    BUFFERS = "buffers"
    WHOLE_WEIGHTS = "whole_weights"
    CONTRIBUTIONS = "contributions"
    ACCUMULATION = "accumulation"
    ACTIVATIONS = "activations"
    HEAD = "head"
    EXCHANGE = "exchange"
    UPDATE = "update"


AT_REST = (
    Kind.MAIN_WEIGHTS,
    Kind.COMPUTE_WEIGHTS,
    Kind.GRADIENTS,
    Kind.MOMENTS,
    Kind.BUFFERS,
)
"""Kinds that stay between steps."""

IN_A_STEP = tuple(kind for kind in Kind if kind not in AT_REST)
"""Kinds that come and go within a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes of one rank."""

    rank: int
    num_bytes: dict[Kind, int]
    """Bytes of every kind at the fullest moment of a step."""

    @property
    def at_rest(self) -> int:
        """Bytes between two steps."""
        return sum(self.num_bytes[kind] for kind in AT_REST)

    @property
    def peak(self) -> int:
        """Bytes at the fullest moment of a step."""
        return sum(self.num_bytes.values())


def moment_bytes(
    groups: Sequence[Group],
    places: dict[str, tuple[int, int]],
    optimizer: OptimizerSettings,
    precision: Precision,
) -> int:
    """Bytes of the optimizer's state on the rank that stands at ``places`` (by kind of layer).

    Step counters, one number a parameter, are not counted.
    """
    total = 0
    for group in groups:
        for index, num_rows in enumerate(group.held_rows(places[group.layers])):
            kinds = state_rows(group, index, optimizer, precision)
            total += num_rows * sum(row.numel() * dtype.itemsize for row, dtype in kinds)
    return total


def state_rows(
    group: Group, index: int, optimizer: OptimizerSettings, precision: Precision
) -> list[tuple[torch.Size, torch.dtype]]:
    """Shape and format of what an optimizer keeps of each row of a group's parameter.

    AdamW has two moments of the moments' format, Muon one of each matrix inside a layer, SGD with
    momentum one of the main weights' format. In 8 bits scales come beside them, in fp32; narrow
    rows are all in fp32.
    """
    shape, dtype = group.layout.shapes[index], precision.moments
    row = shape[1:]
    if optimizer.kind == "sgd":
        return [(row, precision.main_weights)] * bool(optimizer.momentum_or_default)
    kept = [(row, dtype)]
    if dtype is torch.uint8:
        scales = torch.Size([eight_bit.num_blocks(shape)])
        kept = [(row, torch.float32)]
        if eight_bit.is_quantized(shape):
            kept = [(row, dtype), (scales, torch.float32)]
    return kept * (1 if index in group.hidden else 2)


def bias_bytes(decoder: DecoderConfig) -> int:
    """Bytes of a sparse layer's bias that takes part in choosing experts; 0 in families without."""
    experts = decoder.experts
    if experts is None or not experts.selection_bias:
        return 0
    return experts.num_experts * FP32_BYTES


def update_bytes(
    groups: Sequence[Group], optimizer: OptimizerSettings, precision: Precision
) -> int:
    """Bytes that an optimizer's step takes for the time of its arithmetic.

    AdamW is one fused kernel where weights and moments have one format, after gradients of another
    format were cast, all of them. Everything else takes the parameters bucket by bucket in fp32:
    AdamW both moments and the new weights, SGD the new weights and a change, with a momentum its
    new value twice. Muon takes the matrices of a unit of the model at a time. Moments in 8 bits are
    made one parameter at a time, by way of several arrays of its size.
    """
    main, gradients, fp32 = precision.main_weights, precision.main_gradients, torch.float32
    numels = [group.run(group.placements.optimizer) for group in groups]
    if optimizer.kind == "adamw" and main is precision.moments and precision.rounding == "nearest":
        return sum(numels) * main.itemsize if gradients is not main else 0
    largest = max(min(held, _largest(group)) for held, group in zip(numels, groups, strict=True))
    in_buckets = sum(n for n, group in zip(numels, groups, strict=True) if not group.hidden)
    bucket = min(in_buckets, BUCKET_ELEMENTS + largest)
    copies = 3 if optimizer.kind != "sgd" else 4 if optimizer.momentum else 2
    copies += (gradients is not fp32) + (main is not fp32)
    coding = _CODING_ARRAYS * largest if precision.moments is torch.uint8 else 0
    of_matrices = max(map(_matrix_bytes, groups))
    return max((copies * bucket + coding) * fp32.itemsize, of_matrices)


def _matrix_bytes(group: Group) -> int:
    """Bytes that Muon takes for a unit: rows in fp32, given and new; matrices, given and made."""
    if not group.hidden:
        return 0
    held, itemsize = group.run(group.placements.optimizer), group.formats.compute.itemsize
    return 2 * FP32_BYTES * held + (2 * group.layout.size + held) * itemsize


def _largest(group: Group) -> int:
    return max(shape.numel() for shape in group.layout.shapes)
