"""The model of a run, sharded from the start, and its optimizer."""

from __future__ import annotations

from pathlib import Path

import torch

from shoal.config import Config
from shoal.fsdp import (
    MixedPrecision,
    Schedule,
    fully_shard_optimizer,
    placements_for,
    sharded_parameters,
)
from shoal.models import Decoder, HFWeights, initialize, load_weights, shard_decoder
from shoal.parallel.context import ContextParallel
from shoal.plan import Precision, read_decoder_config, topology_of
from shoal.training.optimizer import build_optimizer


def build_model(
    config: Config, precision: Precision, device: torch.device
) -> tuple[Decoder, Schedule]:
    """This rank's part of the model, without values; every rank calls it.

    No rank ever holds the whole: the modules are made without storage, sharded, and only then
    given memory.
    """
    topology = topology_of(config)
    meshes = topology.meshes(device.type)
    context_parallel = ContextParallel.over(topology, device, config.parallel.context_exchange)
    with torch.device("meta"):
        model = Decoder(
            read_decoder_config(config.model),
            precision.compute,
            recompute=config.train.recompute,
            context=context_parallel,
        )
    dense, expert = config.sharding.dense, config.sharding.expert
    context = shard_decoder(
        model,
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
    )
    return model, context


def fill_model(model: Decoder, config: Config) -> None:
    """Give a model the values that a new run starts from: its folder's, or those of the seed."""
    if config.model.path is None:
        initialize(model, config.run.seed)
    else:
        load_weights(model, HFWeights(Path(config.model.path), model.config))


def build_sharded_optimizer(
    config: Config, model: Decoder, precision: Precision
) -> torch.optim.Optimizer:
    """The optimizer over this rank's rows of ``model``."""
    optimizer = build_optimizer(
        config.optimizer, sharded_parameters(model), moment_dtype=precision.moments
    )
    fully_shard_optimizer(optimizer)
    return optimizer
