"""The whole configuration tree."""

from __future__ import annotations

from shoal.config.checkpoint import CheckpointSettings
from shoal.config.cluster import ClusterSettings
from shoal.config.data import DataSettings
from shoal.config.model import ModelSettings
from shoal.config.optimizer import OptimizerSettings
from shoal.config.parallel import ParallelSettings
from shoal.config.precision import PrecisionSettings
from shoal.config.run import RunSettings
from shoal.config.section import Section
from shoal.config.sharding import ShardingSettings
from shoal.config.train import TrainSettings


class Config(Section):
    """One YAML file."""

    run: RunSettings = RunSettings()
    """Name, folder and seed."""
    model: ModelSettings
    """The model that is trained."""
    data: DataSettings
    """What it is trained on."""
    cluster: ClusterSettings = ClusterSettings()
    """What the job runs on."""
    parallel: ParallelSettings = ParallelSettings()
    """Degrees of parallelism besides data parallelism."""
    sharding: ShardingSettings = ShardingSettings()
    """Placement of parameters, gradients and optimizer state."""
    precision: PrecisionSettings = PrecisionSettings()
    """Number formats."""
    optimizer: OptimizerSettings = OptimizerSettings()
    """Update rule."""
    train: TrainSettings
    """Steps and batches."""
    checkpoint: CheckpointSettings = CheckpointSettings()
    """Saving and resuming."""
