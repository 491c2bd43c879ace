"""Runs the chunks of one stage through a step, action by action."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from shoal.fsdp import Schedule, ShardedParameter, microbatch
from shoal.fsdp.group import group_of
from shoal.parallel.pipeline.actions import Action, ActionKind, actions_of
from shoal.parallel.pipeline.links import Boundary, Cargo, Links, Receipt
from shoal.parallel.pipeline.stages import Stages
from shoal.parallel.pipeline.timeline import make_timeline

Tensors = tuple[torch.Tensor, ...]


class Chunk(Protocol):
    """A run of layers as the pipeline sees it."""

    @property
    def context(self) -> Schedule:
        """The sharding context of its modules, which no other chunk shares."""

    def boundary(self, microbatch: int) -> Sequence[Boundary]:
        """What it takes from the chunk before it, and likewise hands to the one after it."""

    def forward(self, microbatch: int, received: Tensors) -> Tensors:
        """Compute a microbatch from what came from the chunk before it, nothing in the first.

        Returns what the next one takes, and from the last chunk the scalar to differentiate.
        """


class Pipeline:
    """This rank's stage; a single stage is a pipeline too, and sends nothing."""

    def __init__(self, stages: Stages, stage: int, links: Links | None) -> None:
        """``links`` is unset for a single stage."""
        self.stages = stages
        self.stage = stage
        self._links = links
        self._actions: dict[int, tuple[Action, ...]] = {}

    def run(self, chunks: Mapping[int, Chunk], num_microbatches: int) -> None:
        """Forward and backward of a step's microbatches; every rank of the pipeline calls it.

        ``chunks`` are those of this stage by number. Gradients are final afterwards, but for those
        of parameters that several stages hold.
        """
        if num_microbatches not in self._actions:
            timeline = make_timeline(self.stages, num_microbatches)
            self._actions[num_microbatches] = actions_of(timeline, self.stage)
        step = _Step(self.stages, self._links, chunks, num_microbatches)
        for action in self._actions[num_microbatches]:
            step.act(action)
        if self._links is not None:
            self._links.finish()

    def add_up(self, parameters: Sequence[ShardedParameter]) -> None:
        """Give the gradients of parameters that both ends hold the sum of both sides.

        The first and the last stage call it once all gradients are final; each parameter has a
        group of its own there, laid out alike. The first stage's part comes first on either side,
        so both get the same bits.
        """
        for parameter in parameters:
            group = group_of(parameter.local)
            assert self._links is not None and group is not None
            if parameter.local.grad is None or group.gradients is None:
                continue
            own = group.gradients.final.data
            other = self._links.swap(own)
            first, last = (own, other) if self.stage == 0 else (other, own)
            own.copy_(first.float() + last.float())


class _Step:
    """What one step has under way on this stage."""

    def __init__(
        self,
        stages: Stages,
        links: Links | None,
        chunks: Mapping[int, Chunk],
        num_microbatches: int,
    ) -> None:
        self._stages = stages
        self._links = links
        self._chunks = chunks
        self._num_microbatches = num_microbatches
        self._coming: dict[tuple[Cargo, int, int], Receipt] = {}
        self._in_flight: dict[tuple[int, int], tuple[Tensors, Tensors]] = {}
        """Inputs and outputs of forwards whose backward is to come."""
        self._gradients: Tensors = ()
        """Of the inputs of the last backward."""

    def act(self, action: Action) -> None:
        """Do one thing."""
        number, chunk = action.microbatch, action.chunk
        match action.kind:
            case ActionKind.FORWARD:
                self._forward(number, chunk)
            case ActionKind.BACKWARD:
                self._backward(number, chunk)
            case ActionKind.RECEIVE_ACTIVATION:
                boundary = self._chunks[chunk].boundary(number)
                self._receive(Cargo.ACTIVATION, number, chunk - 1, chunk, boundary)
            case ActionKind.SEND_ACTIVATION:
                _, outputs = self._in_flight[number, chunk]
                self._send(Cargo.ACTIVATION, chunk, chunk + 1, outputs)
            case ActionKind.RECEIVE_GRADIENT:
                boundary = self._chunks[chunk].boundary(number)
                gradients = [part for part in boundary if part.has_gradient]
                self._receive(Cargo.GRADIENT, number, chunk + 1, chunk, gradients)
            case ActionKind.SEND_GRADIENT:
                self._send(Cargo.GRADIENT, chunk, chunk - 1, self._gradients)

    def _forward(self, number: int, chunk: int) -> None:
        inputs: Tensors = ()
        if not self._stages.is_first(chunk):
            inputs = self._coming.pop((Cargo.ACTIVATION, number, chunk)).wait()
            for tensor in self._with_gradient(number, chunk, inputs):
                tensor.requires_grad_()
        self._in_flight[number, chunk] = inputs, self._chunks[chunk].forward(number, inputs)

    def _backward(self, number: int, chunk: int) -> None:
        inputs, outputs = self._in_flight.pop((number, chunk))
        gradients: Sequence[torch.Tensor | None] = [None]
        if not self._stages.is_last(chunk):
            gradients = self._coming.pop((Cargo.GRADIENT, number, chunk)).wait()
            outputs = self._with_gradient(number, chunk, outputs)
        # One that depends on no parameter, such as sums before the first expert, has no graph.
        pairs = [pair for pair in zip(outputs, gradients, strict=True) if pair[0].requires_grad]
        with microbatch(self._chunks[chunk].context, is_last=number == self._num_microbatches - 1):
            torch.autograd.backward([pair[0] for pair in pairs], [pair[1] for pair in pairs])
        self._gradients = tuple(
            torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            for tensor in (inputs and self._with_gradient(number, chunk, inputs))
        )

    def _with_gradient(self, number: int, chunk: int, tensors: Tensors) -> Tensors:
        boundary = self._chunks[chunk].boundary(number)
        pairs = zip(tensors, boundary, strict=True)
        return tuple(tensor for tensor, part in pairs if part.has_gradient)

    def _receive(
        self, cargo: Cargo, number: int, source: int, target: int, boundary: Sequence[Boundary]
    ) -> None:
        assert self._links is not None
        receipt = self._links.receive(cargo, source, target, boundary)
        self._coming[cargo, number, target] = receipt

    def _send(self, cargo: Cargo, source: int, target: int, tensors: Tensors) -> None:
        assert self._links is not None
        self._links.send(cargo, source, target, tensors)
