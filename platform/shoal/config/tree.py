"""The whole configuration tree."""

from __future__ import annotations

from pydantic import model_validator

from shoal.config.checkpoint import CheckpointSettings
from shoal.config.cluster import ClusterSettings
from shoal.config.data import DataSettings
from shoal.config.model import ModelSettings
from shoal.config.optimizer import OptimizerSettings
from shoal.config.parallel import ParallelSettings
from shoal.config.precision import PrecisionSettings
from shoal.config.run import RunSettings
from shoal.config.section import Section, refuse
from shoal.config.sharding import ShardingSettings
from shoal.config.train import TrainSettings
from shoal.errors import ConfigError


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

    @model_validator(mode="after")
    def _schedule_fits_the_run(self) -> Config:
        schedule = self.optimizer.schedule
        length = schedule.warmup_steps + (schedule.decay_steps or 0)
        if length > self.train.steps:
            name = "decay_steps" if schedule.decay_steps else "warmup_steps"
            problem = f"warm-up and decay take {length} steps, the run has {self.train.steps}"
            remedy = f"Shorten them to {self.train.steps} steps together, or raise train.steps"
            value = getattr(schedule, name)
            refuse([ConfigError(f"optimizer.schedule.{name}", value, problem, remedy)])
        return self
