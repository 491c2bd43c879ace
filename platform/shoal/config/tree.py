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
from shoal.config.serve import ServeSettings
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
    serve: ServeSettings = ServeSettings()
    """How the model is served."""

    @model_validator(mode="after")
    def _schedule_fits_the_run(self) -> Config:
        schedule, steps = self.optimizer.schedule, self.train.steps
        found = []
        if schedule.warmup_steps >= steps:
            found.append(
                ConfigError(
                    "optimizer.schedule.warmup_steps",
                    schedule.warmup_steps,
                    f"the run has {steps} steps in all",
                    f"Give fewer than {steps}, or raise train.steps",
                )
            )
        elif schedule.warmup_steps + (schedule.decay_steps or 0) > steps:
            rest = steps - schedule.warmup_steps
            found.append(
                ConfigError(
                    "optimizer.schedule.decay_steps",
                    schedule.decay_steps,
                    f"only {rest} steps remain after the warm-up",
                    f"Give at most {rest}, or raise train.steps",
                )
            )
        refuse(found)
        return self
