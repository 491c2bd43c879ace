"""Bytes that each rank needs, by kind.

At rest, between two steps, stand the buffers of every group (``Group``) and the moments. In a step
come on top:

    whole weights   those of a unit in use, of the units around it, and of the next one on its way
    contributions   what backward makes, full size in the compute format: of the same units, one
                    being made while its neighbour's is reduced, and once more what peers send
    accumulation    sums over microbatches, where they cannot use the memory of the gradients
    activations     see ``shoal.plan.activations``; in a pipeline, of all microbatches in flight,
                    and messages that may still be on their way
    head            a chunk of logits and the gradients that the loss computes ahead
    exchange        rows on their way to experts that ranks share, of an even routing; keys and
                    values of a layer, with their gradients, among ranks that share sequences

The peak is the sum of all. It is an upper estimate: not all of them are at their largest at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch

from shoal.config import OptimizerSettings
from shoal.plan.group import Group


class Kind(StrEnum):
    """What bytes are for."""

    MAIN_WEIGHTS = "main_weights"
    COMPUTE_WEIGHTS = "compute_weights"
    GRADIENTS = "gradients"
    MOMENTS = "moments"
    WHOLE_WEIGHTS = "whole_weights"
    CONTRIBUTIONS = "contributions"
    ACCUMULATION = "accumulation"
    ACTIVATIONS = "activations"
    HEAD = "head"
    EXCHANGE = "exchange"


AT_REST = (Kind.MAIN_WEIGHTS, Kind.COMPUTE_WEIGHTS, Kind.GRADIENTS, Kind.MOMENTS)
"""Kinds that stay between steps."""

IN_A_STEP = tuple(kind for kind in Kind if kind not in AT_REST)
"""Kinds that come and go within a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes of one rank."""

    rank: int
    num_bytes: dict[Kind, int]
    """Bytes of every kind."""

    @property
    def at_rest(self) -> int:
        """Bytes between two steps."""
        return sum(self.num_bytes[kind] for kind in AT_REST)

    @property
    def peak(self) -> int:
        """Bytes at the fullest moment of a step, at most."""
        return sum(self.num_bytes.values())


def moment_bytes(
    groups: Sequence[Group],
    places: dict[str, tuple[int, int]],
    optimizer: OptimizerSettings,
    moments: torch.dtype,
) -> int:
    """Bytes of the optimizer's state on the rank that stands at ``places`` (by kind of layer).

    AdamW has two moments of ``moments``, SGD with momentum one of the main weights' format. Step
    counters, one number a parameter, are not counted.
    """
    if optimizer.kind == "sgd":
        per_element = groups[0].formats.main_weights.itemsize if optimizer.momentum else 0
    else:
        per_element = 2 * moments.itemsize
    held = sum(sum(group.held_numels(places[group.layers])) for group in groups)
    return held * per_element


def whole_weight_bytes(groups: Sequence[Group]) -> int:
    """Bytes of whole weights at the fullest moment; one part's ``groups`` in forward order."""
    return _fullest(groups, [group.whole_weight_bytes for group in groups])


def contribution_bytes(groups: Sequence[Group]) -> int:
    """Bytes of contributions at the fullest moment; one part's ``groups`` in forward order."""
    sizes = [group.partial_bytes for group in groups]
    return _fullest(groups, sizes) + max(sizes)


def _fullest(groups: Sequence[Group], sizes: Sequence[int]) -> int:
    """The most that a unit, those around it and the next one have together."""
    following = [*sizes[1:], 0]
    around = [
        sum(size for other, size in zip(groups, sizes, strict=True) if other.is_around(group))
        for group in groups
    ]
    return max(inside + after for inside, after in zip(around, following, strict=True))
