"""From a step to logits and tokens: packed weights, layers, keys and values."""

from shoal.inference.forward.model import ServedModel
from shoal.inference.forward.precision import activation_dtype, resolved_precision
from shoal.inference.forward.rows import Rows
from shoal.inference.forward.runner import Results, Runner

__all__ = [
    "Results",
    "Rows",
    "Runner",
    "ServedModel",
    "activation_dtype",
    "resolved_precision",
]
