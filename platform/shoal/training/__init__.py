"""The loop that one rank runs: schedule, loss, clipping, optimizer, metrics. Nothing of Ray."""

from shoal.training.adamw import AdamW
from shoal.training.events import EventKind, append_event, read_events
from shoal.training.metrics import MetricsReader, MetricsWriter, StepMetrics
from shoal.training.optimizer import build_optimizer, set_learning_rate
from shoal.training.progress import ProgressLine
from shoal.training.schedule import Schedule

__all__ = [
    "AdamW",
    "EventKind",
    "MetricsReader",
    "MetricsWriter",
    "ProgressLine",
    "Schedule",
    "StepMetrics",
    "append_event",
    "build_optimizer",
    "read_events",
    "set_learning_rate",
]
