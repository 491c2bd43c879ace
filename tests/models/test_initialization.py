"""Initial weights as a function of seed, name and element."""

from __future__ import annotations

import hashlib
import random
from statistics import NormalDist

import torch

from shoal.models import Decoder, DecoderConfig, InitialWeights, initialize
from tests.models.tiny import TINY

SHAPES = {
    "model.a.weight": torch.Size((50, 7)),
    "model.b.weight": torch.Size((50, 7)),
    "model.norm.weight": torch.Size((66,)),
    "model.a.bias": torch.Size((66,)),
}


def weights(seed: int = 3, deviation: float = 0.5) -> InitialWeights:
    return InitialWeights(SHAPES, seed, deviation)


def philox(counter: int, key: int) -> list[int]:
    """Four words of Philox 4x64 with ten rounds, in plain integers, after Salmon et al."""
    mask = 2**64 - 1
    x = [(counter >> (64 * place)) & mask for place in range(4)]
    k = [key & mask, key >> 64]
    for _ in range(10):
        first, second = x[0] * 0xD2E7470EE14C6C93, x[2] * 0xCA5A826395121157
        x = [
            (second >> 64) ^ x[1] ^ k[0],
            second & mask,
            (first >> 64) ^ x[3] ^ k[1],
            first & mask,
        ]
        k = [(k[0] + 0x9E3779B97F4A7C15) & mask, (k[1] + 0xBB67AE8584CAA73B) & mask]
    return x


def test_elements_equal_their_definition() -> None:
    digest = hashlib.blake2b(b"model.a.weight", digest_size=16, key=(3).to_bytes(8, "little"))
    key = int.from_bytes(digest.digest(), "little")
    values = weights().rows("model.a.weight", 0, 50).flatten()
    for element in (0, 1, 2, 3, 4, 5, 101, 349):
        word = philox(element // 4 + 1, key)[element % 4]
        uniform = ((word >> 12) + 0.5) / 2**52
        expected = 0.5 * NormalDist().inv_cdf(uniform)
        assert abs(values[element].item() - expected) < 1e-6


def test_any_rows_are_the_same_as_those_of_the_whole() -> None:
    whole = weights().rows("model.a.weight", 0, 50)
    chance = random.Random(1)
    for _ in range(50):
        start = chance.randrange(51)
        stop = chance.randrange(start, 51)
        assert torch.equal(weights().rows("model.a.weight", start, stop), whole[start:stop])


def test_seed_and_name_matter_norms_are_one_and_biases_zero() -> None:
    base = weights().rows("model.a.weight", 0, 50)
    assert not torch.isclose(base, weights(4).rows("model.a.weight", 0, 50)).any()
    assert not torch.isclose(base, weights().rows("model.b.weight", 0, 50)).any()
    assert torch.equal(weights().rows("model.norm.weight", 5, 9), torch.ones(4))
    assert torch.equal(weights().rows("model.a.bias", 5, 9), torch.zeros(4))


def test_matrices_are_normal_with_the_deviation_asked_for() -> None:
    source = InitialWeights({"m": torch.Size((1000, 1000))}, 7, 0.02)
    values = source.rows("m", 0, 1000).double() / 0.02
    assert abs(values.mean().item()) < 0.005
    assert abs(values.var().item() - 1) < 0.005
    assert abs(values.pow(4).mean().item() - 3) < 0.03
    assert 4.5 < values.abs().max().item() < 6.5
    rows = values[:-1].flatten() * values[1:].flatten()
    assert abs(rows.mean().item()) < 0.005


def test_initialize_fills_every_parameter_and_a_tied_head_once() -> None:
    config = DecoderConfig.from_hf(TINY["smollm2"])
    first, second, other = (Decoder(config, torch.float32) for _ in range(3))
    initialize(first, 1)
    initialize(second, 1)
    initialize(other, 2)
    assert first.get_parameter("lm_head.weight") is first.get_parameter("model.embed_tokens.weight")
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    head = first.get_parameter("lm_head.weight")
    assert not torch.equal(head, other.get_parameter("lm_head.weight"))
    assert abs(head.std().item() - 0.2) < 0.01
    half = Decoder(config, torch.bfloat16)
    initialize(half, 1)
    assert torch.equal(half.get_parameter("lm_head.weight"), head.bfloat16())
