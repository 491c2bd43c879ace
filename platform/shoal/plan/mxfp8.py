"""Which parameters of a run multiply in MXFP8, and what the emulation of a product takes.

A product holds both of its operands once more, quantized, in bf16, while the second of them is
being quantized piece by piece, which takes 11 bytes an element at most.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from shoal.config import Config
from shoal.models import Bf16Choice, DecoderConfig, check_quantized_gather, choose_mxfp8
from shoal.models.mxfp8 import Matrix, layer_matrices
from shoal.ops.mxfp8 import PIECE


def mxfp8_parameters(config: Config, decoder: DecoderConfig) -> frozenset[str]:
    """Names of the parameters of ``decoder`` that multiply in MXFP8; none without ``mxfp8``.

    Raises ``ConfigError`` for a list of exceptions that does not fit the model, and for matrices
    that should travel in MXFP8 and cannot.
    """
    settings = config.precision
    if settings.compute != "mxfp8":
        return frozenset()
    kept = settings.first_last_layers_bf16
    bf16 = Bf16Choice(
        at_start=settings.num_layers_at_start_in_bf16 if kept else 0,
        at_end=settings.num_layers_at_end_in_bf16 if kept else 0,
        patterns=settings.keep_bf16,
    )
    chosen = choose_mxfp8(decoder, bf16)
    if settings.parameter_gather != "bf16":
        check_quantized_gather(decoder, chosen, is_asked_for=settings.parameter_gather is not None)
    return chosen


ELEMENT_BYTES = 2
QUANTIZING_BYTES = 11
"""Of an element that is being quantized, besides its result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scratch:
    """Bytes that products of one layer take while they are made; the largest counts."""

    decoder: DecoderConfig
    chosen: Collection[str]
    num_tokens: int
    """Of a microbatch, on one rank."""

    num_sharing: int
    """Ranks that share experts."""

    def attention(self, layer: int) -> int:
        """Of the products in attention."""
        return self._most(layer, ".self_attn.")

    def mlp(self, layer: int) -> int:
        """Of those in the MLP or the experts."""
        return self._most(layer, ".mlp.")

    def _most(self, layer: int, part: str) -> int:
        if not self.chosen:
            return 0
        found = [m for m in layer_matrices(self.decoder, layer) if m.name in self.chosen]
        return max((self._bytes(matrix) for matrix in found if part in matrix.name), default=0)

    def _bytes(self, matrix: Matrix) -> int:
        rows, experts = self.num_tokens, self.decoder.experts
        if ".experts." in matrix.name:
            assert experts is not None
            visits = rows * experts.experts_per_token * self.num_sharing
            rows = math.ceil(visits / experts.num_experts)
        inputs, outputs = rows * matrix.columns, rows * matrix.rows
        weight = matrix.rows * matrix.columns
        pairs = ((inputs, weight), (outputs, weight), (outputs, inputs))
        return max(
            ELEMENT_BYTES * (first + second) + QUANTIZING_BYTES * min(second, PIECE)
            for first, second in pairs
        )
