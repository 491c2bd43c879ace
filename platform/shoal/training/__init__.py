"""The loop that one rank runs: schedule, loss, clipping, optimizer, metrics. Nothing of Ray."""

from shoal.training.adamw import AdamW
from shoal.training.build import build_model, build_sharded_optimizer, fill_model
from shoal.training.events import EventKind, EventReader, append_event
from shoal.training.guard import Guard, SpoiledStep
from shoal.training.job import TrainJob, TrainResult, run_folder
from shoal.training.loop import train
from shoal.training.loss import StepWeights
from shoal.training.metrics import MetricsReader, MetricsWriter, StepMetrics
from shoal.training.microbatch import Microbatch
from shoal.training.moments import Moments
from shoal.training.muon import Muon
from shoal.training.optimizer import build_optimizer, set_learning_rate, skipping
from shoal.training.orthogonal import orthogonalized
from shoal.training.pace import Pace
from shoal.training.passes import Passes
from shoal.training.progress import ProgressLine
from shoal.training.rate import LearningRate
from shoal.training.rounding import Nearest, Rounding, Stochastic
from shoal.training.sgd import SGD
from shoal.training.start import check_resume, check_storage, starting_point
from shoal.training.step import Stepper
from shoal.training.updates import WideOptimizer

__all__ = [
    "AdamW",
    "EventKind",
    "EventReader",
    "Guard",
    "LearningRate",
    "MetricsReader",
    "MetricsWriter",
    "Microbatch",
    "Moments",
    "Muon",
    "Nearest",
    "Pace",
    "Passes",
    "ProgressLine",
    "Rounding",
    "SGD",
    "SpoiledStep",
    "StepMetrics",
    "StepWeights",
    "Stepper",
    "Stochastic",
    "TrainJob",
    "TrainResult",
    "WideOptimizer",
    "append_event",
    "build_model",
    "build_optimizer",
    "build_sharded_optimizer",
    "check_resume",
    "check_storage",
    "fill_model",
    "orthogonalized",
    "run_folder",
    "set_learning_rate",
    "skipping",
    "starting_point",
    "train",
]
