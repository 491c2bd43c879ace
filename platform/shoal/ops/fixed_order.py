"""The decoder's operations by kernels of fixed order, in the place of torch's.

    with fixed_order("bf16"):
        output = decoder(tokens, labels=labels, each_label=True)

This is the arithmetic of the serving engine, so that the log-probabilities of the trainer's forward
pass equal the engine's bit for bit. Weights are packed when an operation first meets them and kept
until the block ends; they must not change meanwhile. There are no gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch.nn import functional

from shoal.errors import ConfigError
from shoal.ops import fixed
from shoal.ops.attention import DocumentSpans
from shoal.ops.cross_entropy import CHUNK_BYTES, IGNORED
from shoal.ops.fixed.kv_cache import GROUP
from shoal.ops.replaceable import kernels_in_force

HEAD_KINDS: dict[fixed.Kind, fixed.Kind] = {"fp32": "fp32", "bf16": "bf16", "mxfp8": "bf16"}
"""What the output head is kept in: it alone decides the logits, so it is never MXFP8."""


@contextmanager
def fixed_order(precision: fixed.Kind) -> Iterator[None]:
    """Compute the operations of ``shoal.ops`` in fixed order, on the CPU and without gradients.

    ``precision`` is that of the linear layers' weights. What enters a product is fp32 for ``fp32``
    and bf16 for the others, so the model has to be of that dtype; the residual stream, the router
    and the shared expert's gate are fp32 always, the head is bf16 for ``mxfp8``.
    """
    with torch.no_grad(), kernels_in_force(FixedOrder(precision)):
        yield


class FixedOrder:
    """The operations; each does what the function of ``shoal.ops`` of its name says."""

    def __init__(self, precision: fixed.Kind) -> None:
        self.precision = precision
        self._dtype = torch.float32 if precision == "fp32" else torch.bfloat16
        self._linear: dict[tuple[int, fixed.Kind], tuple[torch.Tensor, fixed.PackedLinear]] = {}
        self._experts: dict[int, tuple[torch.Tensor, fixed.PackedExperts]] = {}

    def linear(
        self, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        packed = self._packed(weight, self.precision, bias)
        return packed(inputs.flatten(0, -2)).view(*inputs.shape[:-1], -1)

    def rms_norm(self, inputs: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        return fixed.rms_norm(inputs, weight, epsilon, dtype=self._dtype)

    def embed(self, tokens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        # fp32 here, and whatever is added to it keeps the residual stream in fp32.
        return functional.embedding(tokens, table).float()

    def swiglu(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return fixed.swiglu(gate, up)

    def cosine_and_sine(self, angles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return cosine_and_sine(angles)

    def rotate(self, heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        num_sequences, length, num_heads, width = heads.shape
        shape = (num_sequences, length, cosine.shape[-1])
        cosine, sine = (x.expand(shape).reshape(-1, shape[2]) for x in (cosine, sine))
        rows = heads.flatten(0, 1)
        rotated, _ = fixed.rotate(rows, rows[:, :0], cosine, sine)
        return rotated.view(num_sequences, length, num_heads, width)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        spans: DocumentSpans | None = None,
        window: int | None = None,
        dropout: float = 0.0,
    ) -> torch.Tensor:
        if dropout:
            raise ValueError("scores are computed without dropout: call eval() on the model")
        num_sequences, length, num_heads, width = query.shape
        if spans is None:
            spans = DocumentSpans(spans=tuple((i, 0, length) for i in range(num_sequences)))
        pages = _Pages.of(spans)
        cache = fixed.KVCache(pages.num_blocks, GROUP, 1, key.shape[2], width, query.dtype)
        cache.write(0, key.flatten(0, 1), value.flatten(0, 1), pages.slots)
        rows = query.flatten(0, 1)
        where = (pages.table, pages.documents, pages.positions)
        attended = fixed.paged_attention(rows, cache, 0, *where, width**-0.5, window)
        return attended.view(num_sequences, length, num_heads, width)

    def route(
        self,
        tokens: torch.Tensor,
        weight: torch.Tensor,
        experts_per_token: int,
        *,
        normalize: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scores = self._packed(weight, "fp32")(tokens.float())
        choices, weights = fixed.route(scores, experts_per_token, normalize=normalize)
        return scores.softmax(dim=-1), choices, weights

    def route_with_bias(
        self,
        tokens: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        experts_per_token: int,
        *,
        normalize: bool,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        raise ValueError("there are no kernels of fixed order for experts chosen with a bias")

    def visit_experts(
        self,
        tokens: torch.Tensor,
        choices: torch.Tensor,
        weights: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        num_experts: int,
    ) -> torch.Tensor:
        found = self._experts.get(id(gate_up))
        if found is None:
            _check_device(gate_up)
            packed = fixed.PackedExperts.pack(gate_up, down, num_experts, kind=self.precision)
            found = self._experts[id(gate_up)] = gate_up, packed
        return found[1](tokens, choices, weights)

    def add_shared_expert(
        self, output: torch.Tensor, shared: torch.Tensor, tokens: torch.Tensor, gate: torch.Tensor
    ) -> torch.Tensor:
        return fixed.add_gated(output, shared, self._packed(gate, "fp32")(tokens.float()))

    def logits(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        packed = self._packed(weight, HEAD_KINDS[self.precision])
        rows = packed(hidden.flatten(0, -2), dtype=torch.float32)
        return rows.view(*hidden.shape[:-1], -1)

    def token_log_probabilities(
        self, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        step = max(CHUNK_BYTES // (4 * weight.shape[0]), 1)
        result = torch.zeros(labels.shape[0], dtype=torch.float32)
        for start in range(0, hidden.shape[0], step):
            targets = labels[start : start + step]
            logits = self.logits(hidden[start : start + step], weight)
            kept = targets != IGNORED
            each = logits.gather(1, targets.where(kept, 0).unsqueeze(1)).squeeze(1)
            result[start : start + step] = (each - fixed.log_normalizer(logits)) * kept
        return result

    def linear_cross_entropy(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        *,
        chunk_rows: int | None = None,
    ) -> torch.Tensor:
        return -self.token_log_probabilities(hidden, weight, labels).sum()

    def _packed(
        self, weight: torch.Tensor, kind: fixed.Kind, bias: torch.Tensor | None = None
    ) -> fixed.PackedLinear:
        found = self._linear.get((id(weight), kind))
        if found is None:
            _check_device(weight)
            packed = fixed.PackedLinear.pack(weight, bias, kind=kind)
            # The weight is kept too, so that its id stays its own.
            found = self._linear[id(weight), kind] = weight, packed
        return found[1]


def cosine_and_sine(angles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of ``angles`` fp32, each number by itself, correct to the last place.

    (torch computes the last few numbers of a tensor by another function than the others.)
    """
    if angles.is_meta:  # shapes alone, which numpy does not have
        return torch.empty_like(angles), torch.empty_like(angles)
    wide = angles.double().numpy()
    return (
        torch.from_numpy(np.cos(wide).astype(np.float32)),
        torch.from_numpy(np.sin(wide).astype(np.float32)),
    )


class _Pages:
    """Where the tokens of packed documents lie in a cache made for them alone."""

    def __init__(self, lengths: list[int]) -> None:
        blocks = [-(-length // GROUP) for length in lengths]
        first = np.cumsum([0, *blocks])
        self.num_blocks = int(first[-1])
        documents = np.repeat(np.arange(len(lengths)), lengths)
        starts = np.cumsum([0, *lengths])[:-1]
        positions = np.arange(len(documents)) - starts[documents]
        table = first[:-1, None] + np.arange(max(blocks))[None, :]
        table = np.minimum(table, self.num_blocks - 1)
        self.table = torch.from_numpy(table.astype(np.int32))
        self.documents = torch.from_numpy(documents.astype(np.int32))
        self.positions = torch.from_numpy(positions.astype(np.int32))
        self.slots = torch.from_numpy(first[documents] * GROUP + positions)

    @staticmethod
    def of(spans: DocumentSpans) -> _Pages:
        """``spans`` in order are the tokens of the batch in order."""
        return _Pages([stop - start for _, start, stop in spans.spans])


def _check_device(weight: torch.Tensor) -> None:
    if weight.device.type != "cpu":
        raise ConfigError(
            "device", str(weight.device), "kernels of fixed order run on the CPU", "Move the model"
        )
