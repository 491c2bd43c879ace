"""Philox4x32-10 in torch against the authors' known answers and the engine's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shoal.inference.sampler.gumbel import philox as philox_of_the_engine
from shoal.ops import philox

ONES = 2**32 - 1
KNOWN = [
    # counter, key, words: file kat_vectors of Random123
    (
        (0, 0, 0, 0),
        (0, 0),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (ONES, ONES, ONES, ONES),
        (ONES, ONES),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(
    counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    assert [word.item() for word in philox((c0, c1, c2, c3), key)] == list(words)


def test_many_counters_as_the_engine_draws_them() -> None:
    low = torch.arange(ONES - 50, ONES + 1)
    high = torch.tensor(7)
    found = philox((low, high, torch.tensor(ONES), torch.tensor(0)), (3, ONES))
    counters = np.stack(
        [low.numpy(), np.full(51, 7), np.full(51, ONES), np.zeros(51)], axis=1
    ).astype(np.uint32)
    philox_of_the_engine(counters, np.array([3, ONES], np.uint32))
    assert np.array_equal(torch.stack(found, dim=1).numpy(), counters.astype(np.int64))
