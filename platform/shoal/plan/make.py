"""Makes the plan of a run, or refuses it."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.config import Config
from shoal.models import DecoderConfig
from shoal.parallel.pipeline.timeline import bubble_share
from shoal.plan.activations import Kernels
from shoal.plan.batches import Batches
from shoal.plan.group import Group, Layers, counted
from shoal.plan.groups import whole_shapes
from shoal.plan.machine import Machine
from shoal.plan.memory import Kind, RankMemory, moment_bytes
from shoal.plan.mxfp8 import mxfp8_parameters
from shoal.plan.plan import Plan
from shoal.plan.precision import Precision, resolve_device, resolve_precision
from shoal.plan.rates import Rates
from shoal.plan.refusals import check, check_domain, stages_of
from shoal.plan.stage import Layout, StagePlan
from shoal.plan.step_time import StepTime
from shoal.topology import Topology


def make_plan(
    config: Config, machine: Machine | None = None, *, rates: Rates | None = None
) -> Plan:
    """The plan of the run that ``config`` describes, on workers like ``machine`` (this one).

    Reads the model's config, the names and shapes of its weights and the first document of each
    source, and allocates nothing. With ``rates`` it tells how long a step takes.

    Raises:
        ConfigError: with every reason that speaks against the run, in one message.
        WorkError: for a damaged file of weights.
    """
    machine = machine or Machine.here()
    decoder, topology = check(config, machine)
    if rates is not None:
        check_domain(config, rates)
    return plan_checked(config, decoder, topology, machine, rates)


def plan_checked(
    config: Config,
    decoder: DecoderConfig,
    topology: Topology,
    machine: Machine,
    rates: Rates | None,
) -> Plan:
    """The plan of a run that was found to be possible."""
    layout = layout_of(config, decoder, topology, machine)
    device, pipeline = resolve_device(config, machine), layout.stages
    stages = [layout.stage(number) for number in range(pipeline.num_stages)]
    bubble = bubble_share(pipeline, layout.batches.num_microbatches)
    traffic = tuple(traffic for stage in stages for traffic in stage.traffic())
    return Plan(
        name=config.run.name,
        model_type=decoder.model_type,
        num_parameters=sum(shape.numel() for shape in whole_shapes(decoder).values()),
        has_experts=decoder.experts is not None,
        device=device,
        precision=layout.precision,
        topology=topology,
        batches=layout.batches,
        levels={"dense": config.sharding.dense, "expert": config.sharding.expert},
        recompute=config.train.recompute,
        layers=tuple(tuple(part.layers for part in stage.parts) for stage in stages),
        bubble_share=bubble,
        memory=_memory(config, topology, stages, layout.precision),
        traffic=traffic,
        rates=rates,
        time=None if rates is None else StepTime.of(layout, stages, rates, device),
    )


def layout_of(
    config: Config, decoder: DecoderConfig, topology: Topology, machine: Machine
) -> Layout:
    """What the stages of a run depend on; raises ``ConfigError`` for batches that do not divide."""
    precision = resolve_precision(config, machine)
    return Layout(
        config=config,
        decoder=decoder,
        topology=topology,
        stages=stages_of(config),
        batches=Batches.of(config, topology),
        precision=precision,
        mxfp8=mxfp8_parameters(config, decoder),
        kernels=Kernels(
            element_bytes=precision.compute.itemsize,
            fused_norm=resolve_device(config, machine) == "cuda",
            shared_experts=topology.expert > 1,
        ),
    )


def _memory(
    config: Config, topology: Topology, stages: Sequence[StagePlan], precision: Precision
) -> tuple[RankMemory, ...]:
    """Bytes of every rank. Those of a stage differ only in the rows that they hold, and so in the
    moments."""
    alike = [stage.num_bytes for stage in stages]
    moments = [_Moments(stage.every_group, config, precision) for stage in stages]
    ranks = []
    for rank in range(topology.world_size):
        at = topology.coordinates(rank)
        places = {"dense": (at.outer, at.inner), "expert": (at.expert_outer, at.expert_inner)}
        sizes = {**alike[at.pipeline], Kind.MOMENTS: moments[at.pipeline].num_bytes(places)}
        ranks.append(RankMemory(rank=rank, num_bytes={kind: sizes[kind] for kind in Kind}))
    return tuple(ranks)


class _Moments:
    """The moments of one stage's ranks; of groups that are alike, one is looked at."""

    def __init__(self, groups: Sequence[Group], config: Config, precision: Precision) -> None:
        self._config = config
        self._precision = precision
        self._kinds = counted(groups)
        self._known: dict[tuple[Layers, tuple[int, int]], int] = {}

    def num_bytes(self, places: dict[str, tuple[int, int]]) -> int:
        """Bytes on the rank that stands at ``places`` (by kind of layer)."""
        layers: set[Layers] = {group.layers for group, _ in self._kinds}
        return sum(self._of(kind, places[kind]) for kind in layers)

    def _of(self, layers: Layers, place: tuple[int, int]) -> int:
        key = layers, place
        if key not in self._known:
            moments = self._precision.moments
            self._known[key] = sum(
                count * moment_bytes((group,), {layers: place}, self._config.optimizer, moments)
                for group, count in self._kinds
                if group.layers == layers
            )
        return self._known[key]
