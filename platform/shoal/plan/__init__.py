"""What a run will need and do, known before it starts; and the reasons to refuse it."""

from shoal.plan.batches import Batches
from shoal.plan.facts import stages_of, topology_of
from shoal.plan.held import buffers_of, held_by_rank
from shoal.plan.machine import Machine
from shoal.plan.make import make_plan, plan_rank
from shoal.plan.memory import BUCKET_ELEMENTS, Kind, RankMemory
from shoal.plan.model import read_decoder_config
from shoal.plan.mxfp8 import mxfp8_parameters
from shoal.plan.plan import Plan
from shoal.plan.precision import Precision, resolve_device, resolve_precision
from shoal.plan.rates import GPUS, Rates, gpu_rates
from shoal.plan.saves import Saves
from shoal.plan.search import Found, search
from shoal.plan.search_sheets import found_as_dict, search_sheets
from shoal.plan.sheet import Sheet, bytes_text
from shoal.plan.size_sheets import sizes_as_dict, sizes_sheet, sizes_shown
from shoal.plan.sizes import Sizes, at_size, plan_at, sizes_of
from shoal.plan.step_time import StepTime
from shoal.plan.svg import draw_plan
from shoal.plan.table import print_plan, print_sheets
from shoal.plan.target import machine_and_rates, search_target
from shoal.plan.traffic import Traffic

__all__ = [
    "BUCKET_ELEMENTS",
    "Batches",
    "Found",
    "GPUS",
    "Kind",
    "Machine",
    "Plan",
    "Precision",
    "RankMemory",
    "Rates",
    "Saves",
    "Sheet",
    "Sizes",
    "StepTime",
    "Traffic",
    "at_size",
    "buffers_of",
    "bytes_text",
    "draw_plan",
    "found_as_dict",
    "gpu_rates",
    "held_by_rank",
    "machine_and_rates",
    "make_plan",
    "mxfp8_parameters",
    "plan_at",
    "plan_rank",
    "print_plan",
    "print_sheets",
    "read_decoder_config",
    "resolve_device",
    "resolve_precision",
    "search",
    "search_sheets",
    "search_target",
    "sizes_as_dict",
    "sizes_of",
    "sizes_sheet",
    "sizes_shown",
    "stages_of",
    "topology_of",
]
