"""Context parallelism: the ranks of a group share the tokens of each sequence."""

from shoal.parallel.context.attention import check_dropout
from shoal.parallel.context.cut import SequenceCut
from shoal.parallel.context.group import ContextParallel, ExchangeKind

__all__ = ["ContextParallel", "ExchangeKind", "SequenceCut", "check_dropout"]
