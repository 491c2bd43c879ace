"""The YAML tree: typed, frozen, unknown keys refused."""

from shoal.config.checkpoint import RESUME_WORDS, CheckpointSettings
from shoal.config.cluster import ClusterSettings
from shoal.config.data import DataSettings, SourceSettings
from shoal.config.guard import GuardSettings
from shoal.config.load import config_from_tree, dump_config, load_config, load_tree
from shoal.config.model import ModelSettings
from shoal.config.optimizer import OptimizerSettings, ScheduleSettings
from shoal.config.overrides import apply_overrides
from shoal.config.parallel import ParallelSettings
from shoal.config.precision import PrecisionSettings
from shoal.config.run import RunSettings
from shoal.config.serve import (
    AuthSettings,
    BatchSettings,
    JournalSettings,
    KVSettings,
    LimitSettings,
    ServeSettings,
)
from shoal.config.serve_config import (
    ServeConfig,
    describes_training,
    load_serve_config,
    load_serve_tree,
    serve_config_from_tree,
)
from shoal.config.sharding import AxisLevels, Level, ShardingSettings
from shoal.config.train import TrainSettings
from shoal.config.tree import Config

__all__ = [
    "AuthSettings",
    "AxisLevels",
    "BatchSettings",
    "CheckpointSettings",
    "ClusterSettings",
    "Config",
    "DataSettings",
    "GuardSettings",
    "JournalSettings",
    "KVSettings",
    "Level",
    "LimitSettings",
    "ModelSettings",
    "OptimizerSettings",
    "ParallelSettings",
    "PrecisionSettings",
    "RESUME_WORDS",
    "RunSettings",
    "ScheduleSettings",
    "ServeConfig",
    "ServeSettings",
    "ShardingSettings",
    "SourceSettings",
    "TrainSettings",
    "apply_overrides",
    "config_from_tree",
    "describes_training",
    "dump_config",
    "load_config",
    "load_serve_config",
    "load_serve_tree",
    "load_tree",
    "serve_config_from_tree",
]
