"""Initial weights as a function of seed, parameter name and element, whatever the layout.

Element i of a parameter is drawn from the Philox counter i of a key made from the seed and the
name (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), so a rank fills its
rows without drawing the others. Matrices are normal with the config's ``initializer_range``, by
the inverse of the normal distribution function; norms are one, biases zero.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

import numpy as np
import torch

from shoal.models.decoder import Decoder
from shoal.models.names import EXPERT_BIAS, tensor_shapes
from shoal.models.stage import DecoderStage
from shoal.models.weights import load_weights

# Philox makes four words of 64 bits a count.
_WORDS = 4
_BLOCK = 2**18


class InitialWeights:
    """A ``WeightSource`` of initial values."""

    def __init__(self, shapes: Mapping[str, torch.Size], seed: int, deviation: float) -> None:
        """``deviation`` is the standard deviation of matrices."""
        self._shapes = shapes
        self._seed = seed
        self._deviation = deviation

    def shapes(self) -> Mapping[str, torch.Size]:
        """Whole shape of every parameter."""
        return self._shapes

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows ``start`` to ``stop``, fp32."""
        shape = (stop - start, *self._shapes[name][1:])
        if name.endswith((".bias", EXPERT_BIAS)):
            return torch.zeros(shape)
        if len(shape) == 1:
            return torch.ones(shape)
        key, width = _key(self._seed, name), math.prod(shape[1:])
        values = torch.empty(shape)
        # In blocks: the work of drawing takes ten times the memory of what is drawn.
        for block in values.view(-1).split(_BLOCK):
            first = start * width + block.storage_offset()
            block.copy_(_normal(key, first, first + block.numel()) * self._deviation)
        return values


def initialize(decoder: Decoder | DecoderStage, seed: int) -> None:
    """Fill a plain or sharded decoder with the initial weights of ``seed``, in [0, 2**63)."""
    config = decoder.config
    source = InitialWeights(tensor_shapes(config), seed, config.initializer_range)
    load_weights(decoder, source)


def _key(seed: int, name: str) -> int:
    digest = hashlib.blake2b(name.encode(), digest_size=16, key=seed.to_bytes(8, "little"))
    return int.from_bytes(digest.digest(), "little")


def _normal(key: int, start: int, stop: int) -> torch.Tensor:
    """Standard normal elements ``start`` to ``stop`` of the key's stream, fp64."""
    first = start // _WORDS
    words = np.random.Philox(key=key, counter=first).random_raw(stop - first * _WORDS)
    words = words[start - first * _WORDS :]
    # 52 bits and a half: exact in fp64, and never 0 or 1.
    uniform = ((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    normal: torch.Tensor = torch.special.ndtri(torch.from_numpy(uniform))
    return normal
