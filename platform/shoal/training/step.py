"""One optimizer step: microbatches, clipping, update, report."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Iterable

import torch
import torch.distributed as dist

from shoal.config import OptimizerSettings
from shoal.data import Batch
from shoal.errors import WorkError
from shoal.training.loss import StepLosses, StepWeights
from shoal.training.metrics import StepMetrics
from shoal.training.optimizer import set_learning_rate
from shoal.training.passes import Passes
from shoal.training.rate import LearningRate


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
    ) -> None:
        """``optimizer`` is adapted to the model of ``passes``.

        ``readers`` is the number of ranks that read each sequence.
        """
        self._passes = passes
        self._optimizer = optimizer
        self._clip = settings.clip
        self._readers = readers
        self._rate = LearningRate(settings=settings, num_steps=num_steps)
        config = passes.model.config
        self._is_sparse = any(config.sparse_layers)
        experts = config.experts
        self._coefficient = experts.balance_coefficient if experts is not None else 0.0

    def step(self, done: int, microbatches: Iterable[Batch]) -> StepMetrics:
        """Update the weights by this rank's microbatches and everyone's; every rank calls it.

        ``done`` counts the steps before this one; there is at least one microbatch, and all are
        read first, to count their labels. Raises WorkError, on every rank and before any weight
        changes, where the loss or the gradient is not finite.
        """
        start = time.perf_counter()
        device = self._passes.device
        batches = list(microbatches)
        weights = StepWeights.count(
            batches,
            readers=self._readers,
            num_ranks=dist.get_world_size() // self._passes.pipeline.stages.num_stages,
            coefficient=self._coefficient,
            device=device,
        )
        outputs = self._passes.run(batches, weights)
        losses = StepLosses.gather(outputs, weights, is_sparse=self._is_sparse, device=device)
        norm = self._norm(done + 1, losses)
        rate = self._rate.at(done)
        set_learning_rate(self._optimizer, rate)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        seconds = time.perf_counter() - start
        num_tokens = weights.num_sequences * batches[0].tokens.shape[1]
        return StepMetrics(
            step=done + 1,
            loss=losses.loss,
            auxiliary_loss=losses.auxiliary,
            grad_norm=norm,
            lr=rate,
            tokens=num_tokens,
            labels=weights.num_labels,
            tokens_per_second=num_tokens / seconds,
            step_seconds=seconds,
            memory_bytes=peak_memory_bytes(device),
        )

    def _norm(self, step: int, losses: StepLosses) -> float:
        """Clip; the norm before. Refuse what would spoil the weights."""
        self._refuse_unless_finite(step, "loss", losses.loss + (losses.auxiliary or 0.0))
        norm = self._passes.norm(self._clip).item()
        self._refuse_unless_finite(step, "gradient's norm", norm)
        return norm

    def _refuse_unless_finite(self, step: int, name: str, value: float) -> None:
        if not math.isfinite(value):
            raise WorkError(
                f"Step {step}: the {name} is {value}. The weights stay those of step {step - 1}. "
                "Lower optimizer.lr, clip the gradient (optimizer.clip), or look at the data."
            )


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory so far: allocated on the GPU, or resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
