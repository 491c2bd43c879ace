"""Makes the plan of a run, or refuses it."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.config import Config
from shoal.models import parameter_shapes
from shoal.parallel.pipeline import make_timeline
from shoal.plan.activations import Kernels
from shoal.plan.batches import Batches
from shoal.plan.group import Formats
from shoal.plan.machine import Machine
from shoal.plan.memory import Kind, RankMemory, moment_bytes
from shoal.plan.plan import Plan
from shoal.plan.precision import Precision, resolve_device, resolve_precision
from shoal.plan.refusals import check, stages_of
from shoal.plan.stage import StagePlan, plan_stages
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
    timeline = make_timeline(stages_of(config), batches.num_microbatches)
    kernels = Kernels(
        element_bytes=precision.compute.itemsize,
        fused_norm=device == "cuda",
        shared_experts=topology.expert > 1,
    )
    stages = plan_stages(
        config,
        decoder,
        topology,
        timeline,
        batches,
        _formats(precision),
        kernels,
        precision,
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
        layers=tuple(tuple(part.layers for part in stage.parts) for stage in stages),
        bubble_share=timeline.bubble_share,
        memory=_memory(config, topology, stages, precision),
        traffic=tuple(traffic for stage in stages for traffic in stage.traffic()),
    )


def _formats(precision: Precision) -> Formats:
    return Formats(
        main_weights=precision.main_weights,
        compute=precision.compute,
        gradients=precision.main_gradients,
        reduce=precision.reduce,
    )


def _memory(
    config: Config, topology: Topology, stages: Sequence[StagePlan], precision: Precision
) -> tuple[RankMemory, ...]:
    """Bytes of every rank. Those of a stage differ only in the rows that they hold, and so in the
    moments."""
    alike = [stage.num_bytes for stage in stages]
    groups = [stage.every_group for stage in stages]
    ranks = []
    for rank in range(topology.world_size):
        at = topology.coordinates(rank)
        places = {"dense": (at.outer, at.inner), "expert": (at.expert_outer, at.expert_inner)}
        moments = moment_bytes(groups[at.pipeline], places, config.optimizer, precision.moments)
        sizes = {**alike[at.pipeline], Kind.MOMENTS: moments}
        ranks.append(RankMemory(rank=rank, num_bytes={kind: sizes[kind] for kind in Kind}))
    return tuple(ranks)
