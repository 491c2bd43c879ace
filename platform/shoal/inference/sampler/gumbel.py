"""Draws from a row of logits by the Gumbel-max trick, with random numbers that have no state.

The random number of vocabulary entry i is a function of (seed, choice, position, i) alone: word
i % 4 of Philox4x32-10 (Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as
1, 2, 3") with

    counter = (i // 4, choice, position, 0)        key = (seed % 2^32, seed // 2^32)

So no request can consume another's numbers, and a request goes on with the same ones wherever and
whenever it is computed. From the word w come

    u = (w + 1/2) / 2^32             exact in fp64, in (0, 1), fine where u is near 1
    g = fp32(-log(-log(u)))          logarithms in fp64: their last bits do not matter
    s = fp32((logit - largest) / temperature) + g        the operations of fp32, each rounded

and the entry with the largest s is drawn, the lowest among equals: entry i with a probability in
proportion to exp(logit_i / temperature).

Logarithms are slow and few entries have a chance, so a bound sorts the others out: with 1 - u at
least 2^k / 2^32, g is at most (32 - k) ln 2, as -log(u) > 1 - u. That changes no result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import uint32, uint64

from shoal.inference.sampler.compiled import compiled, inlined

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

_MULTIPLIER_0, _MULTIPLIER_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL_0, _WEYL_1 = np.uint32(0x9E3779B9), np.uint32(0xBB67AE85)
_HALF_WORD = np.uint64(32)
_LN_2 = np.float32(math.nextafter(math.log(2), 1))
_LARGEST_NOISE = np.float32(33) * _LN_2
_TILE = 1024
_NOTHING = np.float32(-np.inf)


@inlined
def _philox(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> Any:
    """Ten rounds of Philox4x32 on words of 32 bits."""
    for _ in range(10):
        product_0 = uint64(c0) * _MULTIPLIER_0
        product_1 = uint64(c2) * _MULTIPLIER_1
        c0 = uint32(uint32(product_1 >> _HALF_WORD) ^ c1 ^ k0)
        c1 = uint32(product_1)
        c2 = uint32(uint32(product_0 >> _HALF_WORD) ^ c3 ^ k1)
        c3 = uint32(product_0)
        k0 = uint32(k0 + _WEYL_0)
        k1 = uint32(k1 + _WEYL_1)
    return c0, c1, c2, c3


@inlined
def _bound(word: Any) -> Any:
    """At least the Gumbel noise of ``word``."""
    # The exponent of 2^32 - 1 - word, which is 2^32 (1 - u) - 1/2, biased by 127; 0 for zero.
    exponent: Any = np.float32(~word).view(np.int32) >> 23
    return np.float32(159 - max(exponent, 126)) * _LN_2


@inlined
def _noise(word: Any) -> Any:
    """Gumbel noise of ``word``."""
    return np.float32(-math.log(-math.log((np.float64(word) + 0.5) * 2.0**-32)))


@compiled
def philox(counters: npt.NDArray[np.uint32], key: npt.NDArray[np.uint32]) -> None:
    """Replace each counter ``[N, 4]`` by the words of Philox4x32-10 under ``key`` ``[2]``."""
    for row in range(counters.shape[0]):
        c0, c1, c2, c3 = counters[row, 0], counters[row, 1], counters[row, 2], counters[row, 3]
        w0, w1, w2, w3 = _philox(c0, c1, c2, c3, key[0], key[1])
        counters[row, 0], counters[row, 1], counters[row, 2], counters[row, 3] = w0, w1, w2, w3


@compiled
def _draw(
    logits: Floats, largest: int, temperature: np.float32, stream: npt.NDArray[np.uint32]
) -> Any:
    """Entry drawn from the whole row; ``stream`` as ``Stream.words``."""
    vocab_size = logits.shape[0]
    scores = np.empty(_TILE, np.float32)
    words = np.empty(_TILE, np.uint32)
    best, drawn = _NOTHING, -1
    # The likeliest entry goes first: after it, little else is worth a look. It comes again.
    for tile in range(-1, -(-vocab_size // _TILE)):
        start, count = largest - largest % 4, largest % 4 + 1
        if tile >= 0:
            start = tile * _TILE
            count = min(_TILE, vocab_size - start)
        hopeful = 0
        for i in range(count):
            scores[i] = (logits[start + i] - logits[largest]) / temperature
            hopeful += scores[i] + _LARGEST_NOISE >= best
        if hopeful == 0:
            continue
        for block in range((count + 3) // 4):
            w0, w1, w2, w3 = _philox(
                uint32(start // 4 + block), stream[0], stream[1], uint32(0), stream[2], stream[3]
            )
            words[4 * block], words[4 * block + 1] = w0, w1
            words[4 * block + 2], words[4 * block + 3] = w2, w3
        hopeful = 0
        for i in range(count):
            hopeful += scores[i] + _bound(words[i]) >= best
        if hopeful == 0:
            continue
        for i in range(count):
            if scores[i] + _bound(words[i]) >= best:
                score = scores[i] + _noise(words[i])
                if score > best or (score == best and start + i < drawn):
                    best, drawn = score, start + i
    return drawn


@compiled
def _draw_among(
    logits: Floats, ids: Ids, largest: int, temperature: np.float32, stream: npt.NDArray[np.uint32]
) -> Any:
    """Entry drawn from those in ``ids``."""
    best, drawn = _NOTHING, np.int64(-1)
    for i in ids:
        w0, w1, w2, w3 = _philox(
            uint32(i // 4), stream[0], stream[1], uint32(0), stream[2], stream[3]
        )
        low, high = (w0, w2) if i % 2 == 0 else (w1, w3)
        word = low if i % 4 < 2 else high
        score = (logits[i] - logits[largest]) / temperature
        if score + _bound(word) >= best:
            score = score + _noise(word)
            if score > best or (score == best and i < drawn):
                best, drawn = score, i
    return drawn


@dataclass(frozen=True, kw_only=True, slots=True)
class Stream:
    """Which random numbers a draw takes."""

    seed: int
    """In [0, 2^64)."""

    choice: int
    """In [0, 2^32)."""

    position: int
    """Absolute position of the token to be drawn, in [0, 2^32)."""

    @property
    def words(self) -> npt.NDArray[np.uint32]:
        """Choice, position and the two words of the key."""
        seed = self.seed
        return np.array(
            [self.choice, self.position, seed & 0xFFFFFFFF, seed >> 32], dtype=np.uint32
        )


def draw(
    logits: Floats, largest: int, stream: Stream, *, temperature: float, ids: Ids | None = None
) -> int:
    """Draw an entry of ``logits`` ``[V]``, or one of ``ids``.

    ``largest`` is the entry with the largest logit, which is finite; others may be -inf, none may
    be NaN. ``temperature`` is above 0.
    """
    divisor = np.float32(temperature)
    if ids is None:
        return int(_draw(logits, largest, divisor, stream.words))
    return int(_draw_among(logits, ids, largest, divisor, stream.words))
