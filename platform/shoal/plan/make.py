"""Makes the plan of a run, or refuses it."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.config import Config
from shoal.models import DecoderConfig, parameter_shapes
from shoal.plan.activations import Kernels, activation_bytes, exchange_bytes, head_bytes
from shoal.plan.batches import Batches
from shoal.plan.context import ContextPlan
from shoal.plan.group import Formats, Group
from shoal.plan.groups import decoder_groups
from shoal.plan.machine import Machine
from shoal.plan.memory import (
    Kind,
    RankMemory,
    contribution_bytes,
    moment_bytes,
    whole_weight_bytes,
)
from shoal.plan.plan import Plan
from shoal.plan.precision import Precision, resolve_device, resolve_precision
from shoal.plan.refusals import check
from shoal.plan.traffic import Traffic, expert_traffic, step_traffic
from shoal.topology import Topology


def make_plan(config: Config, machine: Machine | None = None) -> Plan:
    """The plan of the run that ``config`` describes, on workers like ``machine`` (this one).

    Reads the model's config, the names and shapes of its weights and the first document of each
    source, and allocates nothing.

    Raises:
        ConfigError: with every reason that speaks against the run, in one message.
        WorkError: for a damaged file of weights.
    """
    machine = machine or Machine.here()
    decoder, topology = check(config, machine)
    device = resolve_device(config, machine)
    precision = resolve_precision(config, machine)
    batches = Batches.of(config, topology)
    groups = decoder_groups(decoder, config.sharding, topology, _formats(precision))
    context = ContextPlan(
        config=config,
        decoder=decoder,
        topology=topology,
        batches=batches,
        compute=precision.compute,
    )
    shapes = parameter_shapes(decoder)
    return Plan(
        name=config.run.name,
        model_type=decoder.model_type,
        num_parameters=sum(shape.numel() for shape in shapes.values()),
        has_experts=decoder.experts is not None,
        device=device,
        precision=precision,
        topology=topology,
        batches=batches,
        levels={"dense": config.sharding.dense, "expert": config.sharding.expert},
        memory=_memory(config, decoder, topology, groups, precision, batches, context, device),
        traffic=(
            *step_traffic(groups, batches.num_microbatches),
            *context.traffic(),
            *_expert_traffic(config, decoder, topology, precision, batches, context),
        ),
    )


def _formats(precision: Precision) -> Formats:
    return Formats(
        main_weights=precision.main_weights,
        compute=precision.compute,
        gradients=precision.main_gradients,
        reduce=precision.reduce,
    )


def _expert_traffic(
    config: Config,
    decoder: DecoderConfig,
    topology: Topology,
    precision: Precision,
    batches: Batches,
    context: ContextPlan,
) -> tuple[Traffic, ...]:
    """What tokens that visit the experts of other ranks add."""
    if decoder.experts is None or topology.expert == 1:
        return ()
    rows = context.tokens_per_rank * decoder.experts.experts_per_token
    return expert_traffic(
        degree=topology.expert,
        num_experts=decoder.experts.num_experts,
        num_visits=batches.num_microbatches * sum(decoder.sparse_layers),
        row_bytes=rows * decoder.hidden_size * precision.compute.itemsize,
        recompute=config.train.recompute == "layer",
    )


def _memory(
    config: Config,
    decoder: DecoderConfig,
    topology: Topology,
    groups: Sequence[Group],
    precision: Precision,
    batches: Batches,
    context: ContextPlan,
    device: str,
) -> tuple[RankMemory, ...]:
    """Bytes of every rank. Ranks differ only in the rows that they hold, and so in the moments."""
    kernels = Kernels(
        element_bytes=precision.compute.itemsize,
        fused_norm=device == "cuda",
        shared_experts=topology.expert > 1,
    )
    num_tokens = context.tokens_per_rank
    recompute = config.train.recompute == "layer"
    rows_on_their_way = (
        exchange_bytes(decoder, kernels.element_bytes, num_tokens) if topology.expert > 1 else 0
    )
    alike = {
        Kind.MAIN_WEIGHTS: sum(group.main_weight_bytes for group in groups),
        Kind.COMPUTE_WEIGHTS: sum(group.compute_weight_bytes for group in groups),
        Kind.GRADIENTS: sum(group.gradient_bytes for group in groups),
        Kind.WHOLE_WEIGHTS: whole_weight_bytes(groups),
        Kind.CONTRIBUTIONS: contribution_bytes(groups),
        Kind.ACCUMULATION: sum(g.accumulation_bytes(batches.num_microbatches) for g in groups),
        Kind.ACTIVATIONS: activation_bytes(decoder, kernels, num_tokens, recompute=recompute),
        Kind.HEAD: head_bytes(decoder, kernels.element_bytes, num_tokens),
        Kind.EXCHANGE: context.exchange_bytes + rows_on_their_way,
    }
    ranks = []
    for rank in range(topology.world_size):
        at = topology.coordinates(rank)
        places = {"dense": (at.outer, at.inner), "expert": (at.expert_outer, at.expert_inner)}
        moments = moment_bytes(groups, places, config.optimizer, precision.moments)
        sizes = {**alike, Kind.MOMENTS: moments}
        ranks.append(RankMemory(rank=rank, num_bytes={kind: sizes[kind] for kind in Kind}))
    return tuple(ranks)
