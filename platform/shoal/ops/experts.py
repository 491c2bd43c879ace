"""The mixture of experts: which experts a token visits, and what they make of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shoal.ops.grouped_linear import grouped_linear
from shoal.ops.linear import linear
from shoal.ops.replaceable import replaceable
from shoal.ops.routing import ExpertGroups, combine, dispatch
from shoal.ops.swiglu import swiglu

_NO_SCORE = 1e-20
"""Added to a sum of scores that may all be zero."""

GroupedProduct = Callable[[torch.Tensor, torch.Tensor, Sequence[int]], torch.Tensor]
"""``grouped_linear``, or the same in another arithmetic."""


@replaceable
def route(
    tokens: torch.Tensor, weight: torch.Tensor, experts_per_token: int, *, normalize: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``tokens`` ``[T, H]`` to probabilities ``[T, E]``, choices and their weights ``[T, k]``.

    All in fp32 whatever the dtype of ``tokens`` and of the router's ``weight`` ``[E, H]``. Choices
    come in increasing order of the expert's number, which is the order in which ``combine`` adds
    their outputs; ``normalize`` scales a token's weights to a sum of one.
    """
    probabilities = linear(tokens.float(), weight.float()).softmax(dim=-1)
    top = probabilities.topk(experts_per_token, dim=-1).indices
    choices = top.sort(dim=-1).values
    weights = probabilities.gather(1, choices)
    if normalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return probabilities, choices, weights


@replaceable
def route_with_bias(
    tokens: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    experts_per_token: int,
    *,
    normalize: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As ``route``, by sigmoids: an expert's ``bias`` ``[E]`` counts for the choice alone.

    A token's experts are those of the largest sums of score and bias; their weights are the scores,
    scaled to a sum of one by ``normalize``, times ``scale``. The probabilities are all scores
    scaled likewise, without a gradient: nothing is learned from them. Source: DeepSeek-AI,
    "DeepSeek-V3 Technical Report", https://arxiv.org/abs/2412.19437, equations 13 to 16.
    """
    scores = linear(tokens.float(), weight.float()).sigmoid()
    top = (scores.detach() + bias).topk(experts_per_token, dim=-1).indices
    choices = top.sort(dim=-1).values
    weights = scores.gather(1, choices)
    if normalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + _NO_SCORE)
    probabilities = scores.detach() / (scores.detach().sum(dim=-1, keepdim=True) + _NO_SCORE)
    return probabilities, choices, weights * scale


@replaceable
def visit_experts(
    tokens: torch.Tensor,
    choices: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    num_experts: int,
) -> torch.Tensor:
    """The weighted sum of each token's experts, ``[T, H]`` to the same.

    ``choices`` and ``weights`` are ``[T, k]``, ``gate_up`` is ``[E * 2I, H]``: the gate rows of an
    expert, then its up rows; ``down`` is ``[E * H, I]``.
    """
    groups = ExpertGroups.of(choices, num_experts)
    rows = run_experts(dispatch(tokens, groups), groups.sizes, gate_up, down)
    return combine(rows, weights, groups)


def run_experts(
    rows: torch.Tensor,
    sizes: Sequence[int],
    gate_up: torch.Tensor,
    down: torch.Tensor,
    products: tuple[GroupedProduct, GroupedProduct] = (grouped_linear, grouped_linear),
) -> torch.Tensor:
    """Each row through its expert, ``[R, H]`` to the same; the experts have ``sizes`` rows in turn.

    ``gate_up`` and ``down`` as for ``visit_experts``, of as many experts as there are ``sizes``;
    ``products`` multiplies with the one and with the other.
    """
    gate, up = products[0](rows, gate_up, sizes).chunk(2, dim=-1)
    return products[1](swiglu(gate, up), down, sizes)


@replaceable
def add_shared_expert(
    output: torch.Tensor, shared: torch.Tensor, tokens: torch.Tensor, gate: torch.Tensor
) -> torch.Tensor:
    """``output + sigmoid(tokens @ gate.T) * shared``, all ``[T, H]`` but ``gate``, ``[1, H]``."""
    return output + linear(tokens, gate).sigmoid() * shared
