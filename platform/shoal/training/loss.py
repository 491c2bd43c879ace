"""The loss of a step, weighted by tokens over all ranks and microbatches.

    gradient = d ( Σ cross-entropy of every label / labels of the step
                 + coefficient · Σ load-balancing loss of every sequence / sequences of the step )

The labels of all microbatches are counted before the first one runs, so each microbatch's part has
its final weight at once; a mean of ranks' means would favour ranks with few labels. The adapter
averages gradients over the data-parallel ranks, so each part is multiplied by their number.

Ranks of a context group read the same sequences and return parts of their losses; so do those of a
pipeline, of which the last stage's alone make any. So losses add up over all ranks as they are,
while the counts are those of whole sequences, once for each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from shoal.data import Batch
from shoal.models import DecoderOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWeights:
    """What the losses of one step's microbatches are divided by."""

    num_labels: int
    """Labels of the step, over all ranks; 0 where every one is masked."""

    num_sequences: int
    """Sequences of the step, over all ranks."""

    num_ranks: int
    """Ranks over which gradients are averaged."""

    coefficient: float
    """Weight of the load-balancing loss."""

    @staticmethod
    def count(
        batches: Sequence[Batch],
        *,
        readers: int,
        num_ranks: int,
        coefficient: float,
        device: torch.device,
    ) -> StepWeights:
        """Count this rank's microbatches and everyone's; every rank calls it.

        ``readers`` is the number of ranks that read each sequence.
        """
        counts = torch.tensor(
            [sum(batch.num_labels for batch in batches), sum(len(b.tokens) for b in batches)],
            device=device,
        )
        dist.all_reduce(counts)
        num_labels, num_sequences = (count // readers for count in counts.tolist())
        return StepWeights(
            num_labels=num_labels,
            num_sequences=num_sequences,
            num_ranks=num_ranks,
            coefficient=coefficient,
        )

    def weigh(self, output: DecoderOutput) -> torch.Tensor:
        """The scalar of one microbatch to differentiate; also without labels it has a graph."""
        assert output.loss_sum is not None, "the model was called with labels"
        loss = output.loss_sum * (self.num_ranks / max(self.num_labels, 1))
        if output.auxiliary is not None and self.coefficient:
            weight = self.coefficient * self.num_ranks / self.num_sequences
            loss = loss + output.auxiliary * weight
        return loss


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLosses:
    """Losses of one step over all ranks, for its report."""

    loss: float
    """Mean cross-entropy of the labels; 0 without any."""

    auxiliary: float | None
    """Mean load-balancing loss of the sequences; None for a dense model."""

    @staticmethod
    def gather(
        outputs: Sequence[DecoderOutput],
        weights: StepWeights,
        *,
        is_sparse: bool,
        device: torch.device,
    ) -> StepLosses:
        """Sum this rank's microbatches and everyone's, in fp64; every rank calls it.

        ``is_sparse`` says whether the model has a load-balancing loss.
        """
        sums = torch.zeros(2, dtype=torch.float64, device=device)
        for output in outputs:
            assert output.loss_sum is not None
            sums[0] += output.loss_sum
            if output.auxiliary is not None:
                sums[1] += output.auxiliary
        dist.all_reduce(sums)
        loss_sum, auxiliary_sum = sums.tolist()
        return StepLosses(
            loss=loss_sum / max(weights.num_labels, 1),
            auxiliary=auxiliary_sum / weights.num_sequences if is_sparse else None,
        )
