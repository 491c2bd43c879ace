"""Kernels of the decoder, one family a file, behind plain functions of tensors.

The functions say what is computed, not how, so that a kernel with a fixed order of summation can
take any of their places without a change above: see ``shoal.ops.replaceable``.
"""

from shoal.ops.attention import Attend, DocumentSpans, attend
from shoal.ops.cross_entropy import linear_cross_entropy
from shoal.ops.embedding import embed
from shoal.ops.experts import (
    GroupedProduct,
    add_shared_expert,
    route,
    route_with_bias,
    run_experts,
    visit_experts,
)
from shoal.ops.grouped_linear import grouped_linear
from shoal.ops.head import logits, token_log_probabilities
from shoal.ops.linear import linear
from shoal.ops.mxfp8_linear import mxfp8_grouped_linear, mxfp8_linear
from shoal.ops.philox import Words, philox
from shoal.ops.rms_norm import rms_norm
from shoal.ops.rotary import cosine_and_sine, rotate
from shoal.ops.routing import ExpertGroups, combine, dispatch, permute
from shoal.ops.swiglu import swiglu

__all__ = [
    "Attend",
    "DocumentSpans",
    "ExpertGroups",
    "GroupedProduct",
    "Words",
    "add_shared_expert",
    "attend",
    "combine",
    "cosine_and_sine",
    "dispatch",
    "embed",
    "grouped_linear",
    "linear",
    "linear_cross_entropy",
    "logits",
    "mxfp8_grouped_linear",
    "mxfp8_linear",
    "permute",
    "philox",
    "rms_norm",
    "rotate",
    "route",
    "route_with_bias",
    "run_experts",
    "swiglu",
    "token_log_probabilities",
    "visit_experts",
]
