"""Draws against a naive reference, known answers and the distribution that they follow."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.inference.sampler.gumbel import Stream, draw, philox

Floats = npt.NDArray[np.float32]


def _words(text: str) -> npt.NDArray[np.uint32]:
    return np.array([int(word, 16) for word in text.split()], dtype=np.uint32)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        # The vectors for philox4x32-10 in the file kat_vectors of Random123.
        ("0 0 0 0", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (
            "ffffffff ffffffff ffffffff ffffffff",
            "ffffffff ffffffff",
            "408f276d 41c83b0e a20bc7c6 6d5451fd",
        ),
        (
            "243f6a88 85a308d3 13198a2e 03707344",
            "a4093822 299f31d0",
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_known_answers(counter: str, key: str, words: str) -> None:
    block = _words(counter)[None].copy()
    philox(block, _words(key))
    np.testing.assert_array_equal(block[0], _words(words))


def _naive_words(stream: Stream, block: int) -> list[int]:
    """Philox4x32-10 as the paper states it, on integers without bounds."""
    mask = 2**32 - 1
    left, right, high, low = block, stream.choice, stream.position, 0
    key_0, key_1 = stream.seed & mask, stream.seed >> 32
    for _ in range(10):
        product_0, product_1 = 0xD2511F53 * left, 0xCD9E8D57 * high
        left, right, high, low = (
            (product_1 >> 32) ^ right ^ key_0,
            product_1 & mask,
            (product_0 >> 32) ^ low ^ key_1,
            product_0 & mask,
        )
        key_0, key_1 = (key_0 + 0x9E3779B9) & mask, (key_1 + 0xBB67AE85) & mask
    return [left, right, high, low]


def _naive_draw(logits: Floats, ids: list[int], temperature: float, stream: Stream) -> int:
    """The definition, entry by entry."""
    best, drawn = -math.inf, -1
    peak = logits.max()
    for i in ids:
        uniform = (_naive_words(stream, i // 4)[i % 4] + 0.5) / 2**32
        noise = np.float32(-math.log(-math.log(uniform)))
        score = float((logits[i] - peak) / np.float32(temperature) + noise)
        if score > best:
            best, drawn = score, i
    return drawn


@settings(max_examples=60)
@given(
    size=st.sampled_from([1, 2, 3, 5, 257, 1023, 1024, 1025, 3001]),
    spread=st.sampled_from([0.0, 0.1, 1.0, 5.0, 30.0]),
    temperature=st.sampled_from([1e-6, 0.1, 0.7, 1.0, 3.0, 1e6]),
    seed=st.integers(0, 2**63 - 1),
    choice=st.integers(0, 127),
    position=st.integers(0, 10**6),
)
def test_draws_are_as_defined(
    size: int, spread: float, temperature: float, seed: int, choice: int, position: int
) -> None:
    rng = np.random.default_rng(seed)
    logits = (rng.normal(size=size) * spread).astype(np.float32)
    logits[rng.random(size) < 0.1] = -np.inf
    logits[rng.integers(size)] = 0.5
    stream = Stream(seed=seed, choice=choice, position=position)
    largest = int(logits.argmax())
    expected = _naive_draw(logits, list(range(size)), temperature, stream)
    assert draw(logits, largest, stream, temperature=temperature) == expected
    ids = np.unique([largest, *rng.integers(0, size, 5)])
    rng.shuffle(ids)
    expected = _naive_draw(logits, sorted(ids.tolist()), temperature, stream)
    assert draw(logits, largest, stream, temperature=temperature, ids=ids) == expected


def test_draws_follow_the_softmax() -> None:
    logits = np.array([0.0, 1.0, -1.0, 2.0, -np.inf, 0.5, 0.0], dtype=np.float32)
    weights = np.exp(logits.astype(np.float64) / 0.8)
    num_draws = 20_000
    drawn = [
        draw(
            logits,
            3,
            Stream(seed=number // 100, choice=number % 4, position=number),
            temperature=0.8,
        )
        for number in range(num_draws)
    ]
    counts = np.bincount(drawn, minlength=7)
    expected = num_draws * weights / weights.sum()
    assert counts[4] == 0
    likely = expected > 0
    chi_square = ((counts - expected)[likely] ** 2 / expected[likely]).sum()
    assert chi_square < 20.5  # 5 degrees of freedom: exceeded once in a thousand seeds


def test_every_part_of_the_stream_counts() -> None:
    logits = np.zeros(50_000, dtype=np.float32)
    streams = [
        Stream(seed=seed, choice=choice, position=position)
        for seed, choice, position in (
            (0, 0, 0),
            (1, 0, 0),
            (2**32, 0, 0),
            (2**62, 0, 0),
            (0, 1, 0),
            (0, 0, 1),
            (0, 1, 1),
        )
    ]
    drawn = {draw(logits, 0, stream, temperature=1.0) for stream in streams}
    assert len(drawn) == len(streams)


def test_an_entry_draws_the_same_in_a_wider_vocabulary() -> None:
    narrow = np.zeros(1000, dtype=np.float32)
    wide = np.full(1500, -np.inf, dtype=np.float32)
    wide[:1000] = 0
    for position in range(20):
        stream = Stream(seed=3, choice=0, position=position)
        drawn = draw(narrow, 0, stream, temperature=1.0)
        assert drawn == draw(wide, 0, stream, temperature=1.0)
