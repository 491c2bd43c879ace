"""The orthogonal matrix nearest to one, roughly, by matrix products alone."""

from __future__ import annotations

import torch

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of x, x^3 and x^5: steep at 0, and between 0.7 and 1.2 soon after."""

NUM_ITERATIONS = 5

EPSILON = 1e-7
"""Least norm that a matrix is divided by."""


def orthogonalized(matrix: torch.Tensor) -> torch.Tensor:
    """``U V^T`` of ``matrix = U S V^T``, with singular values near 1; computed in its format.

    A Newton-Schulz iteration of fifth order with the coefficients of Jordan et al., "Muon: An
    optimizer for hidden layers in neural networks" (2024). A matrix of zeros stays one.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    value = matrix.t() if is_tall else matrix
    value = value / value.norm().clamp(min=EPSILON)
    for _ in range(NUM_ITERATIONS):
        gram = value @ value.t()
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        value = torch.addmm(value, polynomial, value, beta=a)
    return value.t() if is_tall else value
