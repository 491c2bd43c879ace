"""Expert parallelism: ranks that share one set of experts send each other's tokens to them.

With E experts over n ranks, rank r holds experts r * E/n to (r + 1) * E/n. A layer's tokens on one
rank, T of them with k experts each, and the R rows that its experts get::

    tokens [T, H]
      dispatch       [T * k, H]   by expert, so by the rank that holds it
      all-to-all     [R, H]       by the rank that sent it, then by expert
      permute        [R, H]       by expert, then by the rank that sent it
      the experts    [R, H]
      permute, all-to-all         the way back
      combine        [T, H]       a token's experts in increasing order of their numbers

No token is dropped and none is padded: how many rows go from whom to whom is agreed first, by one
small all-gather. Every rank takes part in every exchange, also one without tokens and one whose
experts nobody chose. An expert sees its rows in the order of the ranks and of their tokens, and a
token's experts are added where the token lives; so the values are those of a process that holds
all tokens and all experts.
"""

from __future__ import annotations

import torch

from shoal import ops
from shoal.parallel.expert.exchange import ExpertExchange


def visit_shared_experts(
    tokens: torch.Tensor,
    choices: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    exchange: ExpertExchange,
    products: tuple[ops.GroupedProduct, ops.GroupedProduct] = (ops.grouped_linear,) * 2,
) -> torch.Tensor:
    """As ``ops.visit_experts``, over experts of which this rank holds its part alone.

    ``tokens`` ``[T, H]``, ``choices`` and ``weights`` ``[T, k]`` are this rank's, ``gate_up`` and
    ``down`` its experts', and ``products`` what multiplies with them. Every rank of the exchange
    calls it, forward and backward.
    """
    groups = ops.ExpertGroups.of(choices, exchange.num_experts)
    route = exchange.route(groups.sizes, tokens.device)
    rows = route.to_experts(ops.dispatch(tokens, groups))
    rows = route.to_tokens(ops.run_experts(rows, route.sizes, gate_up, down, products))
    return ops.combine(rows, weights, groups)
