"""Forward and backward of a step through this rank's parts of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shoal.fsdp import (
    Communicator,
    Schedule,
    ShardedParameter,
    clip_gradients,
    gradient_norm,
    sharded_parameters,
)
from shoal.models import Carried, Decoder, DecoderOutput, DecoderStage
from shoal.parallel.pipeline import Boundary, Pipeline
from shoal.training.loss import StepWeights
from shoal.training.microbatch import Microbatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What the passes of one step gave on this rank, besides gradients."""

    outputs: list[DecoderOutput]
    """The losses of each microbatch on the last stage, nothing on others."""

    loads: torch.Tensor | None
    """Where a bias chooses experts: ``[L, E]`` int64, how many of this rank's tokens visited each
    expert of the L sparse layers here; None without any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """This rank's parts of the model, and what takes microbatches through them."""

    model: DecoderStage
    """The parts."""

    contexts: tuple[Schedule, ...]
    """The sharding context of each."""

    pipeline: Pipeline
    """The order of their forwards and backwards."""

    everyone: Communicator | None
    """The ranks at this rank's place in every stage; None where there is one stage."""

    holders: tuple[Communicator, ...] = ()
    """Axes that together join the ranks of this stage, where biases of experts are updated."""

    @property
    def device(self) -> torch.device:
        """Where the parts live."""
        return self.contexts[0].device

    def run(self, microbatches: Sequence[Microbatch], weights: StepWeights) -> Ran:
        """Make the gradients of this rank's microbatches; every rank calls it."""
        outputs: list[DecoderOutput] = []
        numbers = self.pipeline.stages.chunks_of(self.pipeline.stage)
        chunks = {
            number: _Chunk(part, context, microbatches, weights, outputs)
            for number, part, context in zip(numbers, self.model.parts, self.contexts, strict=True)
        }
        self.pipeline.run(chunks, len(microbatches))
        self.pipeline.add_up(self._on_both_ends())
        loads = [chunk.loads for chunk in chunks.values() if chunk.loads is not None]
        return Ran(outputs=outputs, loads=torch.cat(loads) if loads else None)

    def norm(self, clip: float | None) -> torch.Tensor:
        """Norm of the whole model's gradients before they are clipped; every rank calls it."""
        if clip is None:
            return gradient_norm(self.model, beyond=self.everyone)
        return clip_gradients(self.model, clip, beyond=self.everyone)

    def _on_both_ends(self) -> list[ShardedParameter]:
        """Parameters that the first and the last stage hold, and this one too."""
        shared = self.model.shared_names
        if not shared:
            return []
        return [p for p in sharded_parameters(self.model) if p.name in shared]


class _Chunk:
    """One part of the model in one step, as the pipeline sees it."""

    def __init__(
        self,
        part: Decoder,
        context: Schedule,
        microbatches: Sequence[Microbatch],
        weights: StepWeights,
        outputs: list[DecoderOutput],
    ) -> None:
        """``outputs`` takes the losses that it makes."""
        self.context = context
        self.loads: torch.Tensor | None = None
        """Visits of its layers' experts so far."""
        self._part = part
        self._microbatches = microbatches
        self._weights = weights
        self._outputs = outputs

    def boundary(self, microbatch: int) -> tuple[Boundary, ...]:
        """See ``Chunk``."""
        return self._part.boundary(self._microbatches[microbatch].batch.tokens)

    def forward(
        self, microbatch: int, received: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        """See ``Chunk``."""
        batch, spans = self._microbatches[microbatch].batch, self._microbatches[microbatch].spans
        output: DecoderOutput = self._part(
            batch.tokens,
            positions=batch.positions,
            spans=spans,
            labels=batch.labels,
            carried=Carried(*received) if received else None,
        )
        if output.loads is not None:
            self.loads = output.loads if self.loads is None else self.loads + output.loads
        if output.carried is not None:
            return tuple(tensor for tensor in output.carried if tensor is not None)
        assert output.loss_sum is not None
        auxiliary = output.auxiliary
        self._outputs.append(
            DecoderOutput(
                None, output.loss_sum.detach(), None if auxiliary is None else auxiliary.detach()
            )
        )
        return (self._weights.weigh(output),)
