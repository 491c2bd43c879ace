"""The model of a run, sharded from the start, and its optimizer."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shoal.config import Config
from shoal.fsdp import (
    Communicator,
    CommunicatorFactory,
    Ledger,
    MixedPrecision,
    Schedule,
    communicator_for,
    fully_shard_optimizer,
    placements_for,
    sharded_parameters,
)
from shoal.models import (
    Decoder,
    DecoderStage,
    HFWeights,
    initialize,
    load_weights,
    matrix_rows,
    shard_decoder,
    split_decoder,
)
from shoal.parallel.context import ContextParallel
from shoal.parallel.pipeline import Links, Pipeline
from shoal.plan import (
    Precision,
    mxfp8_parameters,
    read_decoder_config,
    stages_of,
    topology_of,
)
from shoal.topology import Axis, Meshes
from shoal.training.optimizer import build_optimizer
from shoal.training.passes import Passes
from shoal.training.updates import WideOptimizer


def build_model(
    config: Config, precision: Precision, device: torch.device, *, ledger: Ledger | None = None
) -> Passes:
    """This rank's parts of the model, without values; every rank calls it.

    No rank ever holds the whole: the modules are made without storage, sharded, and only then
    given memory. ``ledger`` records what the ranks send each other.
    """
    topology, stages = topology_of(config), stages_of(config)
    stage = topology.coordinates(dist.get_rank()).pipeline
    decoder = read_decoder_config(config.model)
    parts = split_decoder(decoder, stages.num_chunks)
    mxfp8 = mxfp8_parameters(config, decoder)
    communicators = _once(communicator_for if ledger is None else ledger.communicator)
    context = ContextParallel.over(
        topology, device, config.parallel.context_exchange, communicators
    )
    with torch.device("meta"):
        model = DecoderStage(
            [
                Decoder(
                    decoder,
                    precision.compute,
                    recompute=config.train.recompute,
                    context=context,
                    part=parts[chunk],
                    mxfp8=mxfp8,
                )
                for chunk in stages.chunks_of(stage)
            ]
        )
    meshes = topology.meshes(device.type)
    contexts = [
        _shard(part, config, precision, meshes, device, communicators) for part in model.parts
    ]
    links, everyone = None, None
    if topology.pipeline > 1:
        links = Links(topology, stages, device, ledger=ledger)
        everyone = communicators(topology.process_group(Axis.PIPELINE), device)
    holders: list[Communicator] = []
    if config.optimizer.expert_bias_rate is not None:
        axes = [axis for axis in (Axis.INNER, Axis.OUTER) if topology.size(axis) > 1]
        holders = [communicators(meshes.dense.get_group(axis.value), device) for axis in axes]
    return Passes(
        model=model,
        contexts=tuple(contexts),
        pipeline=Pipeline(stages, stage, links),
        everyone=everyone,
        holders=tuple(holders),
    )


def _shard(
    part: Decoder,
    config: Config,
    precision: Precision,
    meshes: Meshes,
    device: torch.device,
    communicators: CommunicatorFactory,
) -> Schedule:
    dense, expert = config.sharding.dense, config.sharding.expert
    return shard_decoder(
        part,
        meshes,
        placements_for(dense.outer, dense.inner),
        placements_for(expert.outer, expert.inner),
        MixedPrecision(
            main_weights=precision.main_weights,
            main_gradients=precision.main_gradients,
            reduce=precision.reduce,
            compute=precision.compute,
        ),
        device,
        communicators=communicators,
        quantized_gather=precision.mxfp8_gather,
    )


def _once(communicators: CommunicatorFactory) -> CommunicatorFactory:
    """One communicator for each group, however many parts of the model are sharded over it."""
    made: dict[ProcessGroup, Communicator] = {}

    def communicator(group: ProcessGroup, device: torch.device) -> Communicator:
        if group not in made:
            made[group] = communicators(group, device)
        return made[group]

    return communicator


def fill_model(model: DecoderStage, config: Config) -> None:
    """Give a model the values that a new run starts from: its folder's, or those of the seed."""
    if config.model.path is None:
        initialize(model, config.run.seed)
    else:
        load_weights(model, HFWeights(Path(config.model.path), model.config))


def build_sharded_optimizer(
    config: Config, model: DecoderStage, precision: Precision
) -> torch.optim.Optimizer:
    """The optimizer over this rank's rows of ``model``."""
    is_muon = config.optimizer.kind == "muon"
    optimizer = build_optimizer(
        config.optimizer,
        sharded_parameters(model),
        precision,
        seed=config.run.seed,
        matrix_rows=matrix_rows(model.config) if is_muon else {},
    )
    fully_shard_optimizer(optimizer, precision_aware=isinstance(optimizer, WideOptimizer))
    return optimizer
