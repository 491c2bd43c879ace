"""What a run will need and do, known before it starts; and the reasons to refuse it."""

from shoal.plan.batches import Batches
from shoal.plan.machine import Machine
from shoal.plan.make import make_plan
from shoal.plan.memory import Kind, RankMemory
from shoal.plan.model import read_decoder_config
from shoal.plan.mxfp8 import mxfp8_parameters
from shoal.plan.plan import Plan
from shoal.plan.precision import Precision, resolve_device, resolve_precision
from shoal.plan.refusals import stages_of, topology_of
from shoal.plan.svg import draw_plan
from shoal.plan.table import print_plan
from shoal.plan.traffic import Traffic

__all__ = [
    "Batches",
    "Kind",
    "Machine",
    "Plan",
    "Precision",
    "RankMemory",
    "Traffic",
    "draw_plan",
    "make_plan",
    "mxfp8_parameters",
    "print_plan",
    "read_decoder_config",
    "resolve_device",
    "resolve_precision",
    "stages_of",
    "topology_of",
]
