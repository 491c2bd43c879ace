"""Pipeline parallelism: which stage computes what when, and what stages send each other."""

from shoal.parallel.pipeline.actions import Action, Deed, actions_of
from shoal.parallel.pipeline.stages import Stages
from shoal.parallel.pipeline.timeline import Timeline, make_timeline

__all__ = ["Action", "Deed", "Stages", "Timeline", "actions_of", "make_timeline"]
