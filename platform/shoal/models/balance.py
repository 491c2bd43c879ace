"""The load-balancing loss of mixture-of-experts layers."""

from __future__ import annotations

import torch

from shoal.parallel.context import ContextParallel


class BalanceLoss:
    """Collects what the sparse layers report and turns it into one loss.

    With E experts, f the share of an expert in the visits (so that the shares add up to the number
    of experts a token visits) and p the mean of its probability, both over all sparse layers and
    tokens of a sequence, a sequence's loss is E times the sum of f * p. Source: Fedus et al.,
    "Switch Transformers", https://arxiv.org/abs/2101.03961, equations 4 to 6, pooled over layers
    as ``transformers`` does.
    """

    def __init__(self) -> None:
        self._visits: list[torch.Tensor] = []
        self._mass: list[torch.Tensor] = []

    def add(self, visits: torch.Tensor | None, mass: torch.Tensor | None) -> None:
        """Take one layer's report, ``[B, E]`` each; None from a dense layer."""
        if visits is not None and mass is not None:
            self._visits.append(visits)
            self._mass.append(mass)

    def total(self, length: int, context: ContextParallel | None) -> torch.Tensor | None:
        """Sum of the sequences' losses, fp32 scalar; None if no layer reported.

        ``length`` is the number of tokens of a sequence. Where the ranks of ``context`` share them,
        each gets a part of the sum, made of the visits of all and its own tokens' probabilities:
        the loss is linear in these, so the parts and their gradients add up to those of the whole.
        """
        if not self._visits:
            return None
        tokens = length * len(self._visits)
        visits = torch.stack(self._visits).sum(dim=0)
        if context is not None:
            visits = context.total(visits)
        visits = visits / tokens
        mass = torch.stack(self._mass).sum(dim=0) / tokens
        return visits.shape[1] * (visits * mass).sum()
