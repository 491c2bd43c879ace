"""A random order of n things that is computed, not stored.

An alternating Feistel network over the smallest power of two that holds n, with cycle walking
back into [0, n) (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). Its round
function is SplitMix64's finalizer (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", 2014). Position and key alone decide the result: any place of the order can be asked
for at any time and on any machine, at no memory, however large n is.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_ROUNDS = 12
_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def permute(
    positions: npt.NDArray[np.int64], size: int, key: tuple[int, ...]
) -> npt.NDArray[np.int64]:
    """Give what stands at each of ``positions``, all in [0, size), in the order ``key`` draws.

    ``key`` holds integers in [0, 2^64). The same array comes back for the same arguments for ever.
    """
    num_bits = (size - 1).bit_length()
    keys = _round_keys(key)
    values = _cipher(positions.astype(np.uint64), num_bits, keys)
    # At least half of the power of two is inside, so few values need another turn.
    while (outside := values >= size).any():
        values[outside] = _cipher(values[outside], num_bits, keys)
    return values.astype(np.int64)


def _cipher(
    values: npt.NDArray[np.uint64], num_bits: int, keys: list[int]
) -> npt.NDArray[np.uint64]:
    """Permute all of [0, 2^num_bits)."""
    low_bits = num_bits // 2
    low_mask = np.uint64(2**low_bits - 1)
    high_mask = np.uint64(2 ** (num_bits - low_bits) - 1)
    shift = np.uint64(low_bits)
    low, high = values & low_mask, values >> shift
    for number, key in enumerate(keys):
        if number % 2:
            low = low ^ (_mix(high ^ np.uint64(key)) & low_mask)
        else:
            high = high ^ (_mix(low ^ np.uint64(key)) & high_mask)
    return high << shift | low


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Scramble each value; products wrap at 2^64."""
    values = (values ^ values >> np.uint64(30)) * np.uint64(_MIX_1)
    values = (values ^ values >> np.uint64(27)) * np.uint64(_MIX_2)
    return values ^ values >> np.uint64(31)


def _round_keys(key: tuple[int, ...]) -> list[int]:
    """One 64-bit key a round, from all of ``key``."""
    state = 0
    for part in (*key, len(key)):
        state = _mix_integer((state ^ part) + _GOLDEN)
    return [_mix_integer(state + _GOLDEN * number) for number in range(1, _ROUNDS + 1)]


def _mix_integer(value: int) -> int:
    value &= _MASK
    value = ((value ^ value >> 30) * _MIX_1) & _MASK
    value = ((value ^ value >> 27) * _MIX_2) & _MASK
    return value ^ value >> 31
