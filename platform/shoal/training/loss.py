"""The loss of a step, weighted by tokens over all ranks and microbatches.

    gradient = d ( Σ cross-entropy of every label / labels of the step
                 + coefficient · Σ load-balancing loss of every sequence / sequences of the step )

The labels of all microbatches are counted before the first one runs, so each microbatch's part has
its final weight at once; a mean of ranks' means would favour ranks with few labels. The adapter
averages gradients over the data-parallel ranks, so each part is multiplied by their number.

Ranks of a context group read the same sequences and return parts of their losses; so do those of a
pipeline, of which the last stage's alone make any. So losses add up over all ranks as they are,
while the counts are those of whole sequences, once for each of them.

All of it stays on the device: no host waits for a count or a loss within the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from shoal.data import IGNORED
from shoal.models import DecoderOutput
from shoal.training.microbatch import Microbatch


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWeights:
    """What the losses of one step's microbatches are divided by; counts are int64 scalars."""

    num_labels: torch.Tensor
    """Labels of the step, over all ranks; 0 where every one is masked."""

    num_sequences: torch.Tensor
    """Sequences of the step, over all ranks."""

    num_told: torch.Tensor
    """Ranks that were told to end after this step."""

    num_ranks: int
    """Ranks over which gradients are averaged."""

    coefficient: float
    """Weight of the load-balancing loss."""

    @staticmethod
    def count(
        microbatches: Sequence[Microbatch],
        *,
        readers: int,
        num_ranks: int,
        coefficient: float,
        told: bool,
    ) -> StepWeights:
        """Count this rank's microbatches and everyone's; every rank calls it.

        ``readers`` is the number of ranks that read each sequence; ``told``, whether this rank was
        told to end, which so becomes known everywhere without a message of its own.
        """
        labels = torch.stack([(m.batch.labels != IGNORED).sum() for m in microbatches]).sum()
        sequences = torch.full_like(labels, sum(len(m.batch.tokens) for m in microbatches))
        counts = torch.stack([labels, sequences, torch.full_like(labels, readers * told)])
        dist.all_reduce(counts)
        num_labels, num_sequences, num_told = (counts // readers).unbind()
        return StepWeights(
            num_labels=num_labels,
            num_sequences=num_sequences,
            num_told=num_told,
            num_ranks=num_ranks,
            coefficient=coefficient,
        )

    def weigh(self, output: DecoderOutput) -> torch.Tensor:
        """The scalar of one microbatch to differentiate; also without labels it has a graph."""
        assert output.loss_sum is not None, "the model was called with labels"
        loss = output.loss_sum * (self.num_ranks / self._labels_or_one).float()
        if output.auxiliary is not None and self.coefficient:
            weight = self.coefficient * self.num_ranks / self.num_sequences.double()
            loss = loss + output.auxiliary * weight.float()
        return loss

    @property
    def _labels_or_one(self) -> torch.Tensor:
        """What sums of losses are divided by, fp64."""
        return self.num_labels.clamp(min=1).double()

    def mean_losses(self, outputs: Sequence[DecoderOutput]) -> torch.Tensor:
        """Means of the whole step, of this rank's microbatches and everyone's; every rank calls it.

        fp64 ``[2]``: the cross-entropy of a label, 0 without any, and the load-balancing loss of a
        sequence, 0 for a dense model.
        """
        sums = torch.zeros(2, dtype=torch.float64, device=self.num_labels.device)
        for output in outputs:
            assert output.loss_sum is not None
            sums[0] += output.loss_sum
            if output.auxiliary is not None:
                sums[1] += output.auxiliary
        dist.all_reduce(sums)
        return sums / torch.stack([self._labels_or_one, self.num_sequences.double()])
