"""What the ranks of one pipeline stage hold and do; without a pipeline, of all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from shoal.config import Config, OptimizerSettings
from shoal.models import DecoderConfig, Part, split_decoder
from shoal.parallel.pipeline import Stages
from shoal.parallel.pipeline.links import messages_on_the_way
from shoal.parallel.pipeline.timeline import before_backwards, in_flight_limit
from shoal.plan.activations import FP32_BYTES, Kernels, exchange_bytes, kept_bytes
from shoal.plan.batches import Batches
from shoal.plan.context import ContextPlan
from shoal.plan.group import Formats, Group, counted
from shoal.plan.groups import decoder_groups, hidden_matrices
from shoal.plan.memory import Kind, bias_bytes, update_bytes
from shoal.plan.messages import boundary_sizes, stage_messages, tied_message
from shoal.plan.moments import Moment, PartMemory
from shoal.plan.mxfp8 import Scratch
from shoal.plan.precision import Precision
from shoal.plan.traffic import Traffic, expert_traffic, load_traffic, step_traffic
from shoal.topology import Axis, Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """The parts of the model on one stage."""

    stage: int
    parts: tuple[Part, ...]

    groups: tuple[tuple[Group, ...], ...]
    """Of each part, in the order of forward."""

    topology: Topology
    stages: Stages
    batches: Batches
    decoder: DecoderConfig
    context: ContextPlan
    kernels: Kernels

    recompute: bool
    """Whether layers are computed again in backward."""

    optimizer: OptimizerSettings
    precision: Precision

    mxfp8: frozenset[str]
    """Parameters that multiply in MXFP8."""

    @property
    def every_group(self) -> tuple[Group, ...]:
        """Those of all parts."""
        return tuple(group for groups in self.groups for group in groups)

    @property
    def num_bytes(self) -> dict[Kind, int]:
        """Bytes of each of the stage's ranks, but for the moments, in which these differ.

        Those that come and go within a step are those of its fullest moment.
        """
        groups, none = counted(self.every_group), dict.fromkeys(Kind, 0)
        at_rest = {
            Kind.MAIN_WEIGHTS: sum(n * group.main_weight_bytes for group, n in groups),
            Kind.COMPUTE_WEIGHTS: sum(n * group.compute_weight_bytes for group, n in groups),
            Kind.GRADIENTS: sum(n * group.gradient_bytes for group, n in groups),
            Kind.BUFFERS: self._num_sparse * bias_bytes(self.decoder),
        }
        fullest = max(self._moments(), key=lambda moment: sum(moment.values()))
        return {**none, **at_rest, **fullest}

    def _moments(self) -> Iterator[Moment]:
        """What comes and goes in a step, whenever it may be most."""
        chunks = self._chunks
        parts = dict(zip(chunks, self.parts, strict=True))
        microbatches = self.batches.num_microbatches
        kept = {chunk: self._kept(part) for chunk, part in parts.items()}
        waiting = before_backwards(self.stages, self.stage, microbatches, kept.__getitem__)
        groups = counted(self.every_group)
        summed = sum(n * group.accumulation_bytes(microbatches) for group, n in groups)
        for chunk, held in zip(chunks, self.groups, strict=True):
            memory = self._memory_of(parts[chunk], held)
            for moment in memory.moments(waiting[chunk] + self._messages):
                yield {**moment, Kind.ACCUMULATION: summed}
        yield {Kind.UPDATE: update_bytes(self.every_group, self.optimizer, self.precision)}

    @property
    def most_kept(self) -> int:
        """Bytes of activations that wait for a backward, at most."""
        kept = dict(zip(self._chunks, map(self._kept, self.parts), strict=True))
        microbatches = self.batches.num_microbatches
        waiting = before_backwards(self.stages, self.stage, microbatches, kept.__getitem__)
        return max(waiting.values())

    def traffic(self) -> Iterator[Traffic]:
        """Collectives inside the stage, and messages to others, of each of its ranks."""
        yield from step_traffic(self.every_group, self.batches.num_microbatches, stage=self.stage)
        yield from self.exchange()
        is_end = self.stages.num_stages > 1 and self.stage in (0, self.stages.num_stages - 1)
        if is_end and self.decoder.tie_word_embeddings:
            table = next(g for g in self.every_group if g.is_copy or not g.unit)
            yield tied_message(self.stage, table)

    def exchange(self) -> Iterator[Traffic]:
        """All of it that does not depend on how parameters are sharded."""
        yield from self.context.traffic()
        yield from self._expert_traffic()
        yield from self._load_traffic()
        if self.stages.num_stages > 1:
            sizes = self._boundary(self.context.mean_tokens)
            microbatches = self.batches.num_microbatches
            yield from stage_messages(self.stages, self.stage, sizes, microbatches)

    def _expert_traffic(self) -> tuple[Traffic, ...]:
        """What tokens that visit the experts of other ranks add."""
        experts, degree = self.decoder.experts, self.topology.expert
        num_sparse = self._num_sparse
        if experts is None or degree == 1 or num_sparse == 0:
            return ()
        row = experts.experts_per_token * self._row_bytes
        return expert_traffic(
            stage=self.stage,
            degree=degree,
            num_experts=experts.num_experts,
            num_visits=self.batches.num_microbatches * num_sparse,
            row_bytes=self.context.mean_tokens * row,
            recompute=self.recompute,
        )

    def _load_traffic(self) -> Iterator[Traffic]:
        """What updates of experts' biases add."""
        experts = self.decoder.experts
        if experts is not None and self.optimizer.expert_bias_rate is not None:
            sizes = {axis: self.topology.size(axis) for axis in (Axis.INNER, Axis.OUTER)}
            num_loads = self._num_sparse * experts.num_experts
            yield from load_traffic(stage=self.stage, sizes=sizes, num_loads=num_loads)

    @property
    def _num_sparse(self) -> int:
        """Sparse layers of the stage."""
        layers = (layer for part in self.parts for layer in part.layers)
        return sum(self.decoder.sparse_layers[layer] for layer in layers)

    def _memory_of(self, part: Part, groups: tuple[Group, ...]) -> PartMemory:
        experts = 0
        if self.topology.expert > 1:
            experts = exchange_bytes(self.decoder, self.kernels.element_bytes, self._tokens)
        return PartMemory(
            decoder=self.decoder,
            part=part,
            groups=groups,
            kernels=self.kernels,
            num_tokens=self._tokens,
            num_microbatches=self.batches.num_microbatches,
            recompute=self.recompute,
            shares_sequences=self.topology.context > 1,
            kv_bytes=self.context.exchange_bytes,
            expert_bytes=experts,
            scratch=Scratch(
                decoder=self.decoder,
                chosen=self.mxfp8,
                num_tokens=self._tokens,
                num_sharing=self.topology.expert,
            ),
        )

    @property
    def _chunks(self) -> range:
        return self.stages.chunks_of(self.stage)

    @property
    def _tokens(self) -> int:
        """Tokens of a microbatch on one rank, at most."""
        return self.context.tokens_per_rank

    @property
    def _row_bytes(self) -> int:
        """Bytes of a token's hidden state."""
        return self.decoder.hidden_size * self.kernels.element_bytes

    def _boundary(self, num_tokens: Fraction) -> tuple[Fraction, ...]:
        return boundary_sizes(self.decoder, self.batches, num_tokens * self._row_bytes)

    def _kept(self, part: Part) -> int:
        """Bytes that one microbatch leaves in a part until its backward."""
        kept = kept_bytes(self.decoder, part, self.kernels, self._tokens, recompute=self.recompute)
        is_input_kept = self.kernels.fused_norm or self.kernels.element_bytes == FP32_BYTES
        return kept if part.is_first or is_input_kept else kept + self._tokens * self._row_bytes

    @property
    def _messages(self) -> int:
        """Bytes of messages on their way: those that a neighbour may not have taken yet, and what
        arrives for the next computation.

        Of activations that were sent, those whose backward is to come are kept anyway.
        """
        stages = self.stages
        if stages.num_stages == 1:
            return 0
        most, microbatches = messages_on_the_way(stages), self.batches.num_microbatches
        chunks = stages.chunks_of(self.stage)
        forth = microbatches * sum(not stages.is_last(chunk) for chunk in chunks)
        back = microbatches * sum(not stages.is_first(chunk) for chunk in chunks)
        waiting = min(in_flight_limit(stages, self.stage), microbatches * len(chunks))
        beyond = max(min(most, forth) - waiting, 0)
        size = math.ceil(sum(self._boundary(Fraction(self._tokens))))
        return (beyond + min(most, back) + 1) * size


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """All that the stages of one run depend on."""

    config: Config
    decoder: DecoderConfig
    topology: Topology
    stages: Stages
    batches: Batches
    precision: Precision
    kernels: Kernels

    mxfp8: frozenset[str]
    """Parameters that multiply in MXFP8."""

    def stage(self, number: int) -> StagePlan:
        """One stage's part of the plan."""
        config, precision = self.config, self.precision
        formats = Formats(
            main_weights=precision.main_weights,
            compute=precision.compute,
            gradients=precision.main_gradients,
            reduce=precision.reduce,
        )
        parts = self._parts(number)
        hidden = hidden_matrices(self.decoder) if config.optimizer.kind == "muon" else frozenset()
        groups = tuple(
            decoder_groups(
                self.decoder,
                part,
                config.sharding,
                self.topology,
                formats,
                hidden,
                quantized=self.mxfp8 if precision.mxfp8_gather else frozenset(),
                recompute=config.train.recompute == "layer",
            )
            for part in parts
        )
        return self._stage(number, parts, groups)

    def bare_stage(self, number: int) -> StagePlan:
        """The same without parameters, for what does not depend on them."""
        return self._stage(number, self._parts(number), ())

    def _parts(self, number: int) -> tuple[Part, ...]:
        chunks = split_decoder(self.decoder, self.stages.num_chunks)
        return tuple(chunks[chunk] for chunk in self.stages.chunks_of(number))

    def _stage(
        self, number: int, parts: tuple[Part, ...], groups: tuple[tuple[Group, ...], ...]
    ) -> StagePlan:
        config = self.config
        return StagePlan(
            stage=number,
            parts=parts,
            groups=groups,
            topology=self.topology,
            stages=self.stages,
            batches=self.batches,
            decoder=self.decoder,
            context=ContextPlan(
                config=config,
                decoder=self.decoder,
                topology=self.topology,
                batches=self.batches,
                compute=self.precision.compute,
                stage=number,
                parts=parts,
            ),
            kernels=self.kernels,
            recompute=config.train.recompute == "layer",
            optimizer=config.optimizer,
            precision=self.precision,
            mxfp8=self.mxfp8,
        )
