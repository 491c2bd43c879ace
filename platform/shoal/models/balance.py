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
        self._loads: list[torch.Tensor] = []
        self._num_layers = 0

    def add(self, visits: torch.Tensor | None, mass: torch.Tensor | None) -> None:
        """Take a layer's report, ``[B, E]`` each; None comes from a dense layer."""
        self.carry(visits, mass, num_layers=1)
        if visits is not None:
            self._loads.append(visits.long().sum(dim=0))

    def carry(
        self, visits: torch.Tensor | None, mass: torch.Tensor | None, *, num_layers: int
    ) -> None:
        """Take the sums of ``num_layers`` layers' reports on an earlier part, ``[B, E]`` each."""
        if visits is not None and mass is not None:
            self._visits.append(visits)
            self._mass.append(mass)
            self._num_layers += num_layers

    def loads(self) -> torch.Tensor | None:
        """Visits of each expert, ``[L, E]`` int64 for L layers added here; None without any."""
        return torch.stack(self._loads) if self._loads else None

    def sums(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The reports so far added up, ``[B, E]`` each; None without any."""
        if not self._visits:
            return None
        return torch.stack(self._visits).sum(dim=0), torch.stack(self._mass).sum(dim=0)

    def total(self, length: int, context: ContextParallel | None) -> torch.Tensor | None:
        """Sum of the sequences' losses, fp32 scalar; None if no layer reported.

        ``length`` is the number of tokens of a sequence. Where the ranks of ``context`` share them,
        each gets a part of the sum, made of the visits of all and its own tokens' probabilities:
        the loss is linear in these, so the parts and their gradients add up to those of the whole.
        """
        sums = self.sums()
        if sums is None:
            return None
        tokens = length * self._num_layers
        visits, mass = sums
        if context is not None:
            visits = context.total(visits)
        visits, mass = visits / tokens, mass / tokens
        return visits.shape[1] * (visits * mass).sum()
