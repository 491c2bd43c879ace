"""Kernels of the decoder whose output rows do not depend on each other.

The bits of a row depend on that row's input and the weights: not on the number of rows, their
order or neighbours, nor on the number of threads. Prefill and decode are the same arithmetic.
Everything is computed by kernels of this package, compiled by numba for the CPU at hand.
"""

from shoal.ops.fixed.attention import paged_attention
from shoal.ops.fixed.elementwise import add_gated, clamped, take_rows, widened
from shoal.ops.fixed.experts import PackedExperts
from shoal.ops.fixed.heads import place_heads
from shoal.ops.fixed.kv_cache import KVCache
from shoal.ops.fixed.linear import PackedLinear
from shoal.ops.fixed.norm import add_rms_norm, rms_norm
from shoal.ops.fixed.panels import Kind
from shoal.ops.fixed.program import Arena, CannotRecord, Program, recording
from shoal.ops.fixed.rotary import rotate
from shoal.ops.fixed.softmax import log_normalizer, log_softmax, route
from shoal.ops.fixed.swiglu import swiglu

__all__ = [
    "Arena",
    "CannotRecord",
    "KVCache",
    "Kind",
    "PackedExperts",
    "PackedLinear",
    "Program",
    "add_gated",
    "add_rms_norm",
    "clamped",
    "log_normalizer",
    "log_softmax",
    "paged_attention",
    "place_heads",
    "recording",
    "rms_norm",
    "rotate",
    "route",
    "swiglu",
    "take_rows",
    "widened",
]
