"""Two ways to keep a model's matrices: in fixed order, or as torch's vendor library likes them.

The second serves where nobody needs the same bits, and to measure what the first costs.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional

from shoal import ops
from shoal.errors import ConfigError
from shoal.ops import fixed


class Linear(Protocol):
    """``x @ weight.T + bias``."""

    def __call__(self, x: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """``x`` ``[T, K]`` to ``[T, N]``, in ``dtype``, by default that of ``x``."""


class Experts(Protocol):
    """The routed experts of a layer."""

    def __call__(
        self, x: torch.Tensor, choices: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """``x`` ``[T, H]`` through ``choices`` ``[T, k]``, weighted: ``[T, H]``."""


class Packing(Protocol):
    """Makes layers of weights, which may be dropped afterwards."""

    kind: fixed.Kind
    """What the weights of layers are kept in, where nothing else is asked for."""

    def linear(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        kind: fixed.Kind | None = None,
    ) -> Linear:
        """Of ``weight`` ``[N, K]`` and ``bias`` ``[N]``."""

    def experts(self, gate_up: torch.Tensor, down: torch.Tensor, num_experts: int) -> Experts:
        """Of ``gate_up`` ``[E * 2I, H]`` and ``down`` ``[E * H, I]``."""


class FixedPacking:
    """Every output row depends on its input row alone."""

    def __init__(self, kind: fixed.Kind) -> None:
        self.kind = kind

    def linear(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        kind: fixed.Kind | None = None,
    ) -> fixed.PackedLinear:
        return fixed.PackedLinear.pack(weight, bias, kind=kind or self.kind)

    def experts(
        self, gate_up: torch.Tensor, down: torch.Tensor, num_experts: int
    ) -> fixed.PackedExperts:
        return fixed.PackedExperts.pack(gate_up, down, num_experts, kind=self.kind)


class VendorPacking:
    """oneDNN as torch calls it: bits depend on how many rows there are."""

    def __init__(self, kind: fixed.Kind) -> None:
        """Raises ConfigError for MXFP8, which torch has no CPU kernels for."""
        if kind == "mxfp8":
            raise ConfigError(
                "serve.batch_invariant",
                False,
                "MXFP8 weights have kernels of fixed order only",
                "Leave it true, or serve bf16",
            )
        self.kind: fixed.Kind = kind

    def linear(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        kind: fixed.Kind | None = None,
    ) -> VendorLinear:
        dtype = torch.float32 if (kind or self.kind) == "fp32" else torch.bfloat16
        return VendorLinear(weight.to(dtype), None if bias is None else bias.to(dtype))

    def experts(self, gate_up: torch.Tensor, down: torch.Tensor, num_experts: int) -> VendorExperts:
        return VendorExperts(gate_up, down, num_experts)


def packing_of(kind: fixed.Kind, *, batch_invariant: bool) -> Packing:
    """How weights of ``kind`` are kept; ConfigError where torch has no kernels for them."""
    return FixedPacking(kind) if batch_invariant else VendorPacking(kind)


class VendorLinear:
    """A linear layer whose weight is in oneDNN's own layout, if torch was built with oneDNN."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._bias = bias
        # On the meta device, which has no such layout, it is told how much memory there will be.
        self._is_packed = torch.backends.mkldnn.is_available() and not weight.is_meta
        self._weight = weight
        if self._is_packed:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, None)

    def __call__(self, x: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        if self._is_packed:
            out = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        else:
            out = functional.linear(x, self._weight, self._bias)
        result: torch.Tensor = out.to(dtype or x.dtype)
        return result


class VendorExperts:
    """Routed experts by one product for each that is visited."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor, num_experts: int) -> None:
        self._gate_up, self._down, self._num_experts = gate_up, down, num_experts

    def __call__(
        self, x: torch.Tensor, choices: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        return ops.visit_experts(x, choices, weights, self._gate_up, self._down, self._num_experts)
