"""Random words that are a function of a key and a counter alone: Philox4x32-10.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). Made of
torch's integer operations, so that the words are the same on every device and no host is asked.
"""

from __future__ import annotations

import torch

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Four words of 32 bits, each in an int64 tensor; the first is the lowest of a counter."""

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF
_ROUNDS = 10


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """The four words of each counter; tensors of any shapes that broadcast, ``key`` in words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # A product of 64 bits may wrap into the sign, which takes no bit from either half.
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = (second >> 32).bitwise_and_(_MASK) ^ (c1 ^ k0)
        c2 = (first >> 32).bitwise_and_(_MASK) ^ (c3 ^ k1)
        c1, c3 = second.bitwise_and_(_MASK), first.bitwise_and_(_MASK)
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3
