"""What the ranks of one pipeline stage hold and do; without a pipeline, of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shoal.config import Config
from shoal.models import DecoderConfig, Part, split_decoder
from shoal.parallel.pipeline import Timeline
from shoal.parallel.pipeline.links import messages_on_the_way
from shoal.plan.activations import (
    Kernels,
    exchange_bytes,
    head_bytes,
    kept_bytes,
    working_bytes,
)
from shoal.plan.batches import Batches
from shoal.plan.context import ContextPlan
from shoal.plan.group import Formats, Group
from shoal.plan.groups import decoder_groups
from shoal.plan.memory import Kind, contribution_bytes, whole_weight_bytes
from shoal.plan.messages import boundary_sizes, stage_messages, tied_message
from shoal.plan.traffic import Traffic, expert_traffic, step_traffic
from shoal.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """The parts of the model on one stage."""

    stage: int
    parts: tuple[Part, ...]

    groups: tuple[tuple[Group, ...], ...]
    """Of each part, in the order of forward."""

    topology: Topology
    timeline: Timeline
    batches: Batches
    decoder: DecoderConfig
    context: ContextPlan
    kernels: Kernels

    recompute: bool
    """Whether layers are computed again in backward."""

    @property
    def every_group(self) -> tuple[Group, ...]:
        """Those of all parts."""
        return tuple(group for groups in self.groups for group in groups)

    @property
    def num_bytes(self) -> dict[Kind, int]:
        """Bytes of each of the stage's ranks, but for the moments, in which these differ."""
        groups, microbatches = self.every_group, self.batches.num_microbatches
        return {
            Kind.MAIN_WEIGHTS: sum(group.main_weight_bytes for group in groups),
            Kind.COMPUTE_WEIGHTS: sum(group.compute_weight_bytes for group in groups),
            Kind.GRADIENTS: sum(group.gradient_bytes for group in groups),
            # One part is computed at a time, and afterwards all of it rests.
            Kind.WHOLE_WEIGHTS: max(map(whole_weight_bytes, self.groups)),
            Kind.CONTRIBUTIONS: max(map(contribution_bytes, self.groups)),
            Kind.ACCUMULATION: sum(group.accumulation_bytes(microbatches) for group in groups),
            Kind.ACTIVATIONS: self._activations + self._messages,
            Kind.HEAD: self._head,
            Kind.EXCHANGE: self.context.exchange_bytes + self._of_experts,
        }

    def traffic(self) -> Iterator[Traffic]:
        """Collectives inside the stage, and messages to others, of each of its ranks."""
        stages, microbatches = self.timeline.stages, self.batches.num_microbatches
        yield from step_traffic(self.every_group, microbatches, stage=self.stage)
        yield from self.context.traffic()
        yield from self._expert_traffic()
        if stages.num_stages == 1:
            return
        yield from stage_messages(stages, self.stage, self._boundary, microbatches)
        if self.decoder.tie_word_embeddings and self.stage in (0, stages.num_stages - 1):
            table = next(g for g in self.every_group if g.is_copy or not g.unit)
            yield tied_message(self.stage, table)

    def _expert_traffic(self) -> tuple[Traffic, ...]:
        """What tokens that visit the experts of other ranks add."""
        experts, degree = self.decoder.experts, self.topology.expert
        layers = [layer for part in self.parts for layer in part.layers]
        num_sparse = sum(self.decoder.sparse_layers[layer] for layer in layers)
        if experts is None or degree == 1 or num_sparse == 0:
            return ()
        row = self.decoder.hidden_size * self.kernels.element_bytes
        return expert_traffic(
            stage=self.stage,
            degree=degree,
            num_experts=experts.num_experts,
            num_visits=self.batches.num_microbatches * num_sparse,
            row_bytes=self._tokens * experts.experts_per_token * row,
            recompute=self.recompute,
        )

    @property
    def _of_experts(self) -> int:
        """Bytes of tokens on their way to the experts of other ranks."""
        if self.topology.expert == 1:
            return 0
        return exchange_bytes(self.decoder, self.kernels.element_bytes, self._tokens)

    @property
    def _tokens(self) -> int:
        """Tokens of a microbatch on one rank, at most."""
        return self.context.tokens_per_rank

    @property
    def _boundary(self) -> tuple[int, ...]:
        hidden = self._tokens * self.decoder.hidden_size * self.kernels.element_bytes
        return boundary_sizes(self.decoder, self.batches, hidden)

    @property
    def _activations(self) -> int:
        parts = dict(zip(self.timeline.stages.chunks_of(self.stage), self.parts, strict=True))

        def kept(chunk: int) -> int:
            return self._of(kept_bytes, parts[chunk], recompute=self.recompute)

        working = max(self._of(working_bytes, part) for part in self.parts)
        return self.timeline.most_in_flight(self.stage, kept) + working

    def _of(self, formula: Callable[..., int], part: Part, **options: bool) -> int:
        return formula(self.decoder, part, self.kernels, self._tokens, **options)

    @property
    def _messages(self) -> int:
        """Bytes of messages of which this stage does not know yet that they have arrived."""
        stages = self.timeline.stages
        return messages_on_the_way(stages) * sum(self._boundary) if stages.num_stages > 1 else 0

    @property
    def _head(self) -> int:
        if not any(part.is_last for part in self.parts):
            return 0
        return head_bytes(self.decoder, self.kernels.element_bytes, self._tokens)


def plan_stages(
    config: Config,
    decoder: DecoderConfig,
    topology: Topology,
    timeline: Timeline,
    batches: Batches,
    formats: Formats,
    kernels: Kernels,
) -> tuple[StagePlan, ...]:
    """Every stage's part of the plan."""
    stages = timeline.stages
    parts = split_decoder(decoder, stages.num_chunks)
    held = [tuple(parts[c] for c in stages.chunks_of(stage)) for stage in range(stages.num_stages)]
    return tuple(
        StagePlan(
            stage=stage,
            parts=held[stage],
            groups=tuple(
                decoder_groups(decoder, part, config.sharding, topology, formats)
                for part in held[stage]
            ),
            topology=topology,
            timeline=timeline,
            batches=batches,
            decoder=decoder,
            context=ContextPlan(
                config=config,
                decoder=decoder,
                topology=topology,
                batches=batches,
                compute=formats.compute,
                stage=stage,
                parts=held[stage],
            ),
            kernels=kernels,
            recompute=config.train.recompute == "layer",
        )
        for stage in range(stages.num_stages)
    )
