"""Experts shared by ranks against one process that has all tokens and all experts."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from shoal.errors import ConfigError
from shoal.fsdp import Communicator, Transport, communicator_for
from shoal.ops import ExpertGroups, visit_experts
from shoal.parallel.expert import ExpertExchange, check_expert_degree, visit_shared_experts
from tests.ranks import RankPool

EXPERTS, CHOICES = 8, 2
ALIGNED, ODD = (64, 16), (66, 5)
"""Hidden size and width of an expert."""

Sizes = tuple[int, int]
Tensors = dict[str, torch.Tensor]

TOKENS = {
    "equal": [9, 9, 9, 9],
    "ragged": [3, 17, 1, 8],
    "a rank without tokens": [5, 0, 7, 2],
    "one rank has them all": [0, 11, 0, 0],
    "no tokens at all": [0, 0, 0, 0],
    "equal again": [9, 9, 9, 9],
}
"""Tokens of each of four ranks, in this order on one live group; fewer ranks take the first."""


def _communicator(transport: Transport) -> Communicator | None:
    group = dist.group.WORLD
    assert group is not None
    if group.size() == 1:
        return None
    return communicator_for(group, torch.device("cpu"), transport)


def _weights(sizes: Sizes) -> tuple[torch.Tensor, torch.Tensor]:
    hidden, width = sizes
    generator = torch.Generator().manual_seed(1)
    gate_up = torch.randn(EXPERTS * 2 * width, hidden, generator=generator) / hidden**0.5
    down = torch.randn(EXPERTS * hidden, width, generator=generator)
    return gate_up, down


def _tokens(rank: int, num_tokens: int, hidden: int, favourites: int, turn: int) -> Tensors:
    """Inputs of one rank; only the first ``favourites`` experts are chosen."""
    generator = torch.Generator().manual_seed(100 * turn + rank)
    scores = torch.randn(num_tokens, favourites, generator=generator)
    return {
        "tokens": torch.randn(num_tokens, hidden, generator=generator),
        "choices": scores.topk(CHOICES).indices.sort().values,
        "weights": torch.rand(num_tokens, CHOICES, generator=generator),
        "direction": torch.randn(num_tokens, hidden, generator=generator),
    }


def _visit(
    inputs: Tensors, gate_up: torch.Tensor, down: torch.Tensor, exchange: ExpertExchange | None
) -> Tensors:
    """Output and gradients of one visit."""
    leaves = [inputs["tokens"], inputs["weights"], gate_up, down]
    tokens, weights, gate_up, down = (leaf.clone().requires_grad_() for leaf in leaves)
    if exchange is None:
        output = visit_experts(tokens, inputs["choices"], weights, gate_up, down, EXPERTS)
    else:
        output = visit_shared_experts(tokens, inputs["choices"], weights, gate_up, down, exchange)
    (output * inputs["direction"]).sum().backward()
    found = {"output": output.detach()}
    leaf_names = ("tokens", "weights", "gate_up", "down")
    for name, leaf in zip(leaf_names, (tokens, weights, gate_up, down), strict=True):
        assert leaf.grad is not None
        found[name] = leaf.grad
    return found


def _shared(transport: Transport, sizes: Sizes, favourites: int) -> list[Tensors]:
    """Every case in turn on one live exchange."""
    rank = dist.get_rank()
    exchange = ExpertExchange(EXPERTS, _communicator(transport))
    gate_up, down = (whole.chunk(exchange.size)[exchange.rank] for whole in _weights(sizes))
    cases = [
        _tokens(rank, counts[rank], sizes[0], favourites, turn)
        for turn, counts in enumerate(TOKENS.values())
    ]
    return [_visit(case, gate_up, down, exchange) for case in cases]


@pytest.mark.parametrize("transport", [Transport.GLOO, Transport.SHARED_MEMORY])
@pytest.mark.parametrize("favourites", [EXPERTS, 3], ids=["all", "ranks without visits"])
@pytest.mark.parametrize("sizes", [ALIGNED, ODD], ids=["aligned", "odd"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_shared_experts_are_those_of_one_process(
    ranks: RankPool, size: int, sizes: Sizes, favourites: int, transport: Transport
) -> None:
    by_rank = ranks.run(size, _shared, transport, sizes, favourites)
    for turn, counts in enumerate(TOKENS.values()):
        parts = [_tokens(rank, counts[rank], sizes[0], favourites, turn) for rank in range(size)]
        everything = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        expected = _visit(everything, *_weights(sizes), None)
        for name, value in expected.items():
            together = torch.cat([found[turn][name] for found in by_rank])
            if sizes == ALIGNED:
                assert torch.equal(together, value), (name, turn)
            else:  # the products of such matrices depend on where they lie in memory
                torch.testing.assert_close(together, value, rtol=1e-5, atol=1e-5)


def _random_routing(num_steps: int, transport: Transport) -> float:
    """Steps of random sizes and choices; what comes back is checked in each."""
    exchange = ExpertExchange(EXPERTS, _communicator(transport))
    generator = torch.Generator().manual_seed(dist.get_rank())
    total = 0.0
    for _ in range(num_steps):
        num_tokens = int(torch.randint(0, 6, (1,), generator=generator))
        choices = torch.rand(num_tokens, EXPERTS, generator=generator).topk(CHOICES).indices
        groups = ExpertGroups.of(choices.sort().values, EXPERTS)
        rows = torch.randn(num_tokens * CHOICES, 3, generator=generator).requires_grad_()
        route = exchange.route(groups.sizes, rows.device)
        returned = route.to_tokens(2 * route.to_experts(rows))
        returned.sum().backward()
        assert torch.equal(returned, 2 * rows)
        assert rows.grad is not None and torch.equal(rows.grad, torch.full_like(rows, 2))
        total += sum(route.sizes)
    return total


@pytest.mark.parametrize(
    ("num_steps", "transport"),
    [
        (200, Transport.AUTO),
        pytest.param(1000, Transport.GLOO, marks=pytest.mark.full),
        pytest.param(1000, Transport.SHARED_MEMORY, marks=pytest.mark.full),
    ],
)
def test_random_routing_does_not_hang(
    ranks: RankPool, num_steps: int, transport: Transport
) -> None:
    visits = ranks.run(4, _random_routing, num_steps, transport)
    assert sum(visits) > 10 * num_steps and len(set(visits)) > 1


@pytest.mark.parametrize(("num_experts", "degree"), [(8, 3), (6, 4), (1, 2)])
def test_experts_must_divide(num_experts: int, degree: int) -> None:
    with pytest.raises(ConfigError, match=f"{num_experts} experts do not divide into {degree}"):
        check_expert_degree(num_experts, degree)
