"""The mixture of experts: equal to its parts one by one, whoever visits beside a token."""

from __future__ import annotations

import pytest
import torch

from shoal.ops.fixed import PackedExperts, PackedLinear, route, swiglu
from shoal.ops.fixed.panels import Kind
from tests.ops.fixed.company import assert_independent, same_bits

KINDS: list[tuple[Kind, torch.dtype]] = [
    ("fp32", torch.float32),
    ("bf16", torch.bfloat16),
    ("mxfp8", torch.bfloat16),
]
EXPERTS, HIDDEN, WIDTH = 7, 66, 70


class Layer:
    """Random experts in both forms: packed together, and each as linear layers."""

    def __init__(self, kind: Kind, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        gate_up = torch.randn(EXPERTS, 2 * WIDTH, HIDDEN, generator=generator) * 0.2
        down = torch.randn(EXPERTS, HIDDEN, WIDTH, generator=generator) * 0.2
        self.packed = PackedExperts.pack(
            gate_up.flatten(0, 1), down.flatten(0, 1), EXPERTS, kind=kind
        )
        self.parts = [
            [
                PackedLinear.pack(weight, kind=kind)
                for weight in (gate_up[e, :WIDTH], gate_up[e, WIDTH:], down[e])
            ]
            for e in range(EXPERTS)
        ]
        self.weights = gate_up, down
        self.tokens = torch.randn(30, HIDDEN, generator=generator).to(dtype)
        self.scores = torch.randn(30, EXPERTS, generator=generator)

    def one_by_one(self, choices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Outputs added in fp32, experts in increasing order."""
        total = torch.zeros(self.tokens.shape)
        for expert, (gate, up, down) in enumerate(self.parts):
            token, choice = (choices == expert).nonzero(as_tuple=True)
            rows = self.tokens[token]
            output = down(swiglu(gate(rows), up(rows)))
            total[token] += output.float() * weights[token, choice].unsqueeze(1)
        return total.to(self.tokens.dtype)


@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_the_layer_equals_its_experts_one_by_one(kind: Kind, dtype: torch.dtype) -> None:
    layer = Layer(kind, dtype)
    for per_token in (1, 3, EXPERTS):
        choices, weights = route(layer.scores, per_token, normalize=True)
        expected = layer.one_by_one(choices, weights)
        assert same_bits(layer.packed(layer.tokens, choices, weights), expected)


@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_tokens_do_not_depend_on_each_other(kind: Kind, dtype: torch.dtype) -> None:
    layer = Layer(kind, dtype)
    choices, weights = route(layer.scores, 3, normalize=False)
    assert_independent(
        lambda chosen: layer.packed(layer.tokens[chosen], choices[chosen], weights[chosen]), 30
    )


def test_results_are_those_of_fp64() -> None:
    layer = Layer("fp32", torch.float32)
    choices, weights = route(layer.scores, 3, normalize=True)
    gate_up, down = (x.double() for x in layer.weights)
    tokens = layer.tokens.double()
    gate, up = torch.einsum("th,eih->tei", tokens, gate_up).chunk(2, dim=2)
    outputs = torch.einsum("tei,ehi->teh", torch.nn.functional.silu(gate) * up, down)
    index = choices.unsqueeze(2).expand(-1, -1, HIDDEN)
    expected = (outputs.gather(1, index) * weights.double().unsqueeze(2)).sum(dim=1)
    result = layer.packed(layer.tokens, choices, weights).double()
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


def test_a_token_is_untouched_by_how_much_its_experts_are_visited() -> None:
    layer = Layer("bf16", torch.bfloat16)
    first = torch.tensor([[2, 5]])
    weight = torch.tensor([[0.75, 0.25]])
    alone = layer.packed(layer.tokens[:1], first, weight)
    for others in ([0, 1], [2, 5], [2, 3], [5, 6]):
        choices = torch.cat((torch.tensor([others]).expand(29, 2), first))
        order = torch.arange(29, -1, -1)  # the first token comes last
        weights = weight.expand(30, 2)
        assert same_bits(layer.packed(layer.tokens[order], choices, weights)[-1:], alone)


def test_one_expert_gets_everything_and_the_rest_nothing() -> None:
    layer = Layer("bf16", torch.bfloat16)
    choices = torch.full((30, 1), 4)
    weights = torch.ones(30, 1)
    expected = layer.one_by_one(choices, weights)
    assert same_bits(layer.packed(layer.tokens, choices, weights), expected)


def test_no_tokens() -> None:
    layer = Layer("mxfp8", torch.bfloat16)
    nothing = torch.empty(0, 2)
    assert layer.packed(layer.tokens[:0], nothing.long(), nothing).shape == (0, HIDDEN)
