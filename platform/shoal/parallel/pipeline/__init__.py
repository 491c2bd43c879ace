"""Pipeline parallelism: which stage computes what when, and what stages send each other."""

from shoal.parallel.pipeline.actions import Action, ActionKind, actions_of
from shoal.parallel.pipeline.links import Boundary, Links
from shoal.parallel.pipeline.pipeline import Chunk, Pipeline
from shoal.parallel.pipeline.stages import Stages
from shoal.parallel.pipeline.timeline import Timeline, make_timeline

__all__ = [
    "Action",
    "ActionKind",
    "Boundary",
    "Chunk",
    "Links",
    "Pipeline",
    "Stages",
    "Timeline",
    "actions_of",
    "make_timeline",
]
