"""One optimizer step: microbatches, clipping, update, report."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from shoal.config import GuardSettings, OptimizerSettings
from shoal.data import Batch
from shoal.training.expert_bias import BiasUpdate
from shoal.training.guard import Guard
from shoal.training.loss import StepWeights
from shoal.training.metrics import StepMetrics
from shoal.training.microbatch import Microbatch
from shoal.training.optimizer import set_learning_rate, skipping
from shoal.training.passes import Passes
from shoal.training.rate import LearningRate


class Read(NamedTuple):
    """What a step has to tell, as plain numbers."""

    loss: float
    auxiliary: float
    norm: float
    num_labels: int
    num_sequences: int
    num_told: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a step has to tell, still on the device."""

    losses: torch.Tensor
    """See ``StepWeights.mean_losses``."""

    norm: torch.Tensor
    """Of the gradient before it was clipped."""

    weights: StepWeights

    def read(self) -> Read:
        """Wait for the step, and take all of it at once."""
        counts = (self.weights.num_labels, self.weights.num_sequences, self.weights.num_told)
        numbers = torch.stack([*self.losses, self.norm.double(), *(c.double() for c in counts)])
        loss, auxiliary, norm, *whole = numbers.tolist()
        return Read(loss, auxiliary, norm, *map(int, whole))


class Stepper:
    """Makes the steps of a run, each a function of its number, its sequences and the state."""

    def __init__(
        self,
        passes: Passes,
        optimizer: torch.optim.Optimizer,
        *,
        settings: OptimizerSettings,
        num_steps: int,
        readers: int = 1,
        guard: Guard | None = None,
    ) -> None:
        """``optimizer`` is adapted to the model of ``passes``.

        ``readers`` is the number of ranks that read each sequence. ``guard``, unless given, refuses
        what is not finite.
        """
        self._passes = passes
        self._optimizer = optimizer
        self._clip = settings.clip
        self._readers = readers
        self._guard = guard or Guard(GuardSettings())
        self._most = torch.full((), torch.inf, dtype=torch.float64, device=passes.device)
        self._rate = LearningRate(settings=settings, num_steps=num_steps)
        self.any_told = False
        """Whether any rank was told to end after the last step, made or refused."""
        config = passes.model.config
        self._biases = BiasUpdate.of(passes.model, settings.expert_bias_rate, passes.holders)
        self._is_sparse = any(config.sparse_layers)
        experts = config.experts
        self._coefficient = experts.balance_coefficient if experts is not None else 0.0

    def step(self, done: int, microbatches: Iterable[Batch], *, told: bool = False) -> StepMetrics:
        """Update the weights by this rank's microbatches and everyone's; every rank calls it.

        ``done`` counts the steps before this one; there is at least one microbatch, and all are
        read first, to count their labels. ``told``, on any rank, sets ``any_told`` on all. Raises
        SpoiledStep, on every rank and with weights and moments of the step before, where the guard
        refuses the loss or the gradient; the next call may make the step of other sequences.
        """
        start = time.perf_counter()
        prepared = [Microbatch.of(batch, self._passes.device) for batch in microbatches]
        rate = self._rate.at(done)
        set_learning_rate(self._optimizer, rate)
        self._most.fill_(self._guard.most)
        outcome = self.iterate(prepared, told=told)
        read = outcome.read()
        self.any_told = read.num_told > 0
        self._guard.check_finite(done + 1, "loss", read.loss + read.auxiliary)
        self._guard.check_finite(done + 1, "gradient's norm", read.norm)
        self._guard.take(done + 1, read.loss)
        seconds = time.perf_counter() - start
        num_tokens = read.num_sequences * prepared[0].batch.tokens.shape[1]
        return StepMetrics(
            step=done + 1,
            loss=read.loss,
            auxiliary_loss=read.auxiliary if self._is_sparse else None,
            grad_norm=read.norm,
            lr=rate,
            tokens=num_tokens,
            labels=read.num_labels,
            tokens_per_second=num_tokens / seconds,
            step_seconds=seconds,
            memory_bytes=peak_memory_bytes(self._passes.device),
        )

    def iterate(self, microbatches: Sequence[Microbatch], *, told: bool = False) -> Outcome:
        """The step itself: nothing in it depends on a number that the host reads from the device.

        Where the guard will refuse the loss or the gradient, a flag makes the optimizer leave
        weights and moments as they are, and biases of experts stay too. The learning rate is that
        of the optimizer's groups.
        """
        passes, optimizer = self._passes, self._optimizer
        weights = StepWeights.count(
            microbatches,
            readers=self._readers,
            num_ranks=dist.get_world_size() // passes.pipeline.stages.num_stages,
            coefficient=self._coefficient,
            told=told,
        )
        ran = passes.run(microbatches, weights)
        losses = weights.mean_losses(ran.outputs)
        norm = passes.norm(self._clip)
        is_good = losses.sum().isfinite() & norm.isfinite() & (losses[0] <= self._most)
        with skipping(optimizer, ~is_good):
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if self._biases is not None:
            assert ran.loads is not None
            self._biases.apply(ran.loads, is_good)
        return Outcome(losses=losses, norm=norm, weights=weights)


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory so far: allocated on the GPU, or resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
