"""Kernels of the decoder, one family a file, behind plain functions of tensors.

The functions say what is computed, not how, so that a kernel with a fixed order of summation can
take any of their places without a change above.
"""

from shoal.ops.attention import DocumentSpans, attend
from shoal.ops.cross_entropy import linear_cross_entropy
from shoal.ops.grouped_linear import grouped_linear
from shoal.ops.linear import linear
from shoal.ops.rms_norm import rms_norm
from shoal.ops.rotary import rotate
from shoal.ops.routing import ExpertGroups, combine, dispatch
from shoal.ops.swiglu import swiglu

__all__ = [
    "DocumentSpans",
    "ExpertGroups",
    "attend",
    "combine",
    "dispatch",
    "grouped_linear",
    "linear",
    "linear_cross_entropy",
    "rms_norm",
    "rotate",
    "swiglu",
]
