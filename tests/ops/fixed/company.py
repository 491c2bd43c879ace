"""The property that every kernel here has: a row's bits do not depend on its company."""

from __future__ import annotations

from collections.abc import Callable

import torch

from shoal.ops.on_threads import on_threads

Compute = Callable[[torch.Tensor], torch.Tensor]
"""Output rows for the input rows of these numbers."""


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors are the same; what is no number equals itself, and -0 is not 0."""
    kind = torch.int16 if left.element_size() == 2 else torch.int32
    left, right = (x.where(~x.isnan(), float("nan")).contiguous() for x in (left, right))
    return torch.equal(left.view(kind), right.view(kind))


def assert_independent(compute: Compute, count: int) -> torch.Tensor:
    """Assert that ``count`` rows are the same alone, split, shuffled, doubled; return them."""
    with on_threads(1):
        expected = compute(torch.arange(count))
        alone = torch.cat([compute(torch.tensor([row])) for row in range(count)])
        assert same_bits(alone, expected)
        for size in (2, 3, 7, 17):
            pieces = [compute(piece) for piece in torch.arange(count).split(size)]
            assert same_bits(torch.cat(pieces), expected), f"split into {size}"
    order = torch.randperm(count, generator=torch.Generator().manual_seed(count))
    doubled = torch.cat((order, torch.arange(count)))
    with on_threads(2):
        assert same_bits(compute(order), expected[order]), "shuffled"
        assert same_bits(compute(doubled), expected[doubled]), "doubled"
    return expected
