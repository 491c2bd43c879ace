"""Balancing experts by the biases that choose them, without a loss.

After each step an expert's bias rises by the rate if the expert had fewer of the step's tokens
than the mean of its layer's experts, and falls by it if more. The bias takes part in choosing
experts and not in weighing them, so no gradient is disturbed. Source: Wang et al., "Auxiliary-
Loss-Free Load Balancing Strategy for Mixture-of-Experts", https://arxiv.org/abs/2408.15664,
algorithm 1.

Tokens are those of all microbatches and of all ranks that compute a layer: of every sequence, and
of every part of one. They are counted in whole numbers, so the sum has one value in any order, and
every rank holds the same biases at every layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shoal.fsdp import Communicator, Reduction
from shoal.models import DecoderStage, Router


@dataclass(frozen=True, slots=True, kw_only=True)
class BiasUpdate:
    """What happens to the biases of this rank's layers after a step."""

    biases: tuple[torch.Tensor, ...]
    """Of each sparse layer here, ``[E]`` fp32, in the order of the layers of each part."""

    rate: float
    """What a bias changes by in a step."""

    ranks: tuple[Communicator, ...]
    """Axes that together join the ranks that hold these layers; none of one rank."""

    @classmethod
    def of(
        cls, model: DecoderStage, rate: float | None, ranks: Sequence[Communicator]
    ) -> BiasUpdate | None:
        """That of a model; None where there is none to make."""
        routers = [module for module in model.modules() if isinstance(module, Router)]
        biases = tuple(router.bias for router in routers if router.bias is not None)
        if rate is None or not biases:
            return None
        return cls(biases=biases, rate=rate, ranks=tuple(ranks))

    @torch.no_grad()
    def apply(self, loads: torch.Tensor, is_good: torch.Tensor) -> None:
        """Change the biases; every rank that holds these layers calls it.

        ``loads`` ``[L, E]`` int64 are visits of this rank's tokens, over all its microbatches.
        ``is_good``, a flag on the device, says whether the step counts.
        """
        total = loads.flatten()
        for ranks in self.ranks:
            ranks.all_reduce(total, total, Reduction(accumulate_dtype=total.dtype)).wait()
        for bias, load in zip(self.biases, total.view_as(loads), strict=True):
            direction = torch.sign(load.sum() - load * len(load)) * is_good
            bias.add_(direction, alpha=self.rate)
