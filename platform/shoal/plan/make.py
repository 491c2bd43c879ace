"""Makes the plan of a run, or refuses it."""

from __future__ import annotations

from dataclasses import replace

from shoal.config import Config
from shoal.models import DecoderConfig
from shoal.parallel.pipeline.timeline import bubble_share
from shoal.plan.activations import Kernels
from shoal.plan.batches import Batches
from shoal.plan.facts import stages_of, topology_of
from shoal.plan.groups import whole_shapes
from shoal.plan.machine import Machine
from shoal.plan.model import read_decoder_config
from shoal.plan.mxfp8 import mxfp8_parameters
from shoal.plan.plan import Plan
from shoal.plan.precision import Precision, resolve_device, resolve_precision
from shoal.plan.ranks import memory_of_ranks
from shoal.plan.rates import Rates
from shoal.plan.refusals import check, check_domain
from shoal.plan.saves import Saves, StageSaves, num_copies
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
    made, stages = _planned(config, decoder, topology, machine, rates)
    saves = [StageSaves(stage, device=made.device) for stage in stages]
    places = map(topology.coordinates, range(topology.world_size))
    file_bytes = tuple(saves[at.pipeline].num_bytes(at) for at in places)
    return replace(made, saves=Saves(file_bytes=file_bytes, num_copies=num_copies(config)))


def plan_without_saves(
    config: Config,
    decoder: DecoderConfig,
    topology: Topology,
    machine: Machine,
    rates: Rates | None,
) -> Plan:
    """The plan of a run that was found to be possible, but for what checkpoints take."""
    return _planned(config, decoder, topology, machine, rates)[0]


def plan_rank(config: Config, precision: Precision, device: str, rank: int) -> tuple[int, int]:
    """Bytes that one rank holds at rest, and bytes of the copies of what it saves.

    Of a run that was planned before, for which ``precision`` and ``device`` were decided.
    """
    decoder, topology = read_decoder_config(config.model), topology_of(config)
    at = topology.coordinates(rank)
    layout = _layout(config, decoder, topology, precision, device)
    stage = layout.stage(at.pipeline)
    [memory] = memory_of_ranks([rank], topology, {at.pipeline: stage}, layout)
    return memory.at_rest, num_copies(config) * StageSaves(stage, device=device).num_bytes(at)


def _planned(
    config: Config,
    decoder: DecoderConfig,
    topology: Topology,
    machine: Machine,
    rates: Rates | None,
) -> tuple[Plan, list[StagePlan]]:
    layout = layout_of(config, decoder, topology, machine)
    device, pipeline = resolve_device(config, machine), layout.stages
    stages = [layout.stage(number) for number in range(pipeline.num_stages)]
    bubble = bubble_share(pipeline, layout.batches.num_microbatches)
    traffic = tuple(traffic for stage in stages for traffic in stage.traffic())
    memory = memory_of_ranks(range(topology.world_size), topology, dict(enumerate(stages)), layout)
    made = Plan(
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
        memory=tuple(memory),
        saves=None,
        traffic=traffic,
        rates=rates,
        time=None if rates is None else StepTime.of(layout, stages, rates, device),
    )
    return made, stages


def layout_of(
    config: Config, decoder: DecoderConfig, topology: Topology, machine: Machine
) -> Layout:
    """What the stages of a run depend on; raises ``ConfigError`` for batches that do not divide."""
    precision, device = resolve_precision(config, machine), resolve_device(config, machine)
    return _layout(config, decoder, topology, precision, device)


def _layout(
    config: Config, decoder: DecoderConfig, topology: Topology, precision: Precision, device: str
) -> Layout:
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
            fused_norm=device == "cuda",
            shared_experts=topology.expert > 1,
        ),
    )
