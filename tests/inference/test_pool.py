"""How large the pools of engines are that share a machine, whoever of them comes first."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.config import ServeSettings
from shoal.errors import ConfigError
from shoal.inference.pool import PROCESS_BYTES, EngineSizes, Room, lone_blocks, pool_blocks
from shoal.models import DecoderConfig
from tests.models.tiny import TINY

GB = 10**9
CONFIG = DecoderConfig.from_hf({**TINY["qwen3"], "max_position_embeddings": 2**20})
SIZES = EngineSizes(weight_bytes=8 * GB, block_bytes=9 * 2**20)
"""Of a model of four billion parameters in bf16."""


def _settings(**serve: Any) -> ServeSettings:
    return ServeSettings.model_validate(serve)


def _together(free_bytes: int, num_engines: int) -> Room:
    """For engines that start together, each with a frontend."""
    return Room(
        free_bytes=free_bytes,
        num_engines=num_engines,
        num_processes=2 * num_engines,
        num_pools=num_engines,
    )


def _taken(num_blocks: int) -> int:
    """Bytes of an engine with such a pool, once that is full."""
    return SIZES.weight_bytes + num_blocks * SIZES.block_bytes + PROCESS_BYTES


def test_a_pool_that_fills_leaves_the_weights_their_place() -> None:
    free = 12_900_000_000
    blocks = pool_blocks(CONFIG, _settings(), SIZES, _together(free, 1))
    left = free - SIZES.weight_bytes - 2 * PROCESS_BYTES
    assert blocks == left // 2 // SIZES.block_bytes
    assert _taken(blocks) + PROCESS_BYTES < free - left // 3


def test_a_pool_of_a_given_size_has_room_beside_the_weights() -> None:
    room = _together(30 * GB, 2)
    most = room.left_bytes(SIZES) // 2 // SIZES.block_bytes
    fits = _settings(replicas=2, kv={"tokens": 64 * most})
    assert pool_blocks(CONFIG, fits, SIZES, room) == most
    more = _settings(replicas=2, kv={"tokens": 64 * (most + 1)})
    with pytest.raises(ConfigError, match=rf"bytes in 2 engines.* Use at most {64 * most},"):
        pool_blocks(CONFIG, more, SIZES, room)


@pytest.mark.parametrize("kv", [{}, {"tokens": 64}])
@pytest.mark.parametrize(("free", "fitting"), [(8, 0), (12.9, 1), (25, 2), (30, 3)])
def test_engines_whose_weights_have_no_room_are_refused(
    kv: dict[str, int], free: float, fitting: int
) -> None:
    room = _together(int(free * GB), 4)
    with pytest.raises(ConfigError, match=r"8,000,000,000 bytes for its weights") as refusal:
        pool_blocks(CONFIG, _settings(replicas=4, kv=kv), SIZES, room)
    assert (refusal.value.field, refusal.value.value) == ("serve.replicas", 4)
    expected = f"Use at most {fitting}" if fitting else "Free some memory, or use a smaller"
    assert refusal.value.remedy.startswith(expected)
    if fitting:
        fewer = _settings(replicas=fitting, kv=kv)
        assert pool_blocks(CONFIG, fewer, SIZES, _together(int(free * GB), fitting)) >= 1


@given(
    free=st.integers(9 * GB, 200 * GB),
    replicas=st.integers(1, 12),
    spread=st.integers(1, 12),
    asked_first=st.lists(st.booleans(), min_size=12, max_size=12),
)
def test_engines_that_decide_alone_leave_room_for_each_other(
    free: int, replicas: int, spread: int, asked_first: list[bool]
) -> None:
    """On a cluster nobody says how many come to a machine, nor when each looks at its memory."""
    here = min(replicas, spread, (free + PROCESS_BYTES) // SIZES.least_bytes)
    settings = _settings(replicas=replicas)
    seen, promised = free, 0
    for _, is_loaded_before_the_next in zip(range(here), asked_first, strict=False):
        try:
            promised += lone_blocks(CONFIG, settings, SIZES, seen) * SIZES.block_bytes
        except ConfigError:  # the share of one of so many is hardly a pool
            assert replicas > 1
            return
        if is_loaded_before_the_next:
            seen -= SIZES.weight_bytes + PROCESS_BYTES
    assert here * SIZES.weight_bytes + (here - 1) * PROCESS_BYTES + promised <= free


def test_one_engine_of_several_is_not_refused_where_it_fits_alone() -> None:
    """Each of two machines has room for one of two engines."""
    settings = _settings(replicas=2)
    left = 12_900_000_000 - SIZES.weight_bytes
    held = lone_blocks(CONFIG, settings, SIZES, 12_900_000_000)
    assert held == left // 4 // SIZES.block_bytes
    given = _settings(replicas=2, kv={"tokens": 6400})
    assert lone_blocks(CONFIG, given, SIZES, 12 * GB) == 100


def test_an_engine_that_others_would_leave_hardly_a_pool_asks_for_its_size() -> None:
    """Whether another one comes to the machine is not known, and a pool of 128 tokens is none."""
    free = 2 * SIZES.least_bytes + 10 * SIZES.block_bytes
    with pytest.raises(ConfigError, match=r"2 of 2 engines fit") as refusal:
        lone_blocks(CONFIG, _settings(replicas=2), SIZES, free)
    assert refusal.value.field == "serve.kv.tokens"
    assert lone_blocks(CONFIG, _settings(replicas=2, kv={"tokens": 6400}), SIZES, free) == 100
    assert lone_blocks(CONFIG, _settings(replicas=1), SIZES, free) > 100
    ample = 4 * SIZES.least_bytes
    assert lone_blocks(CONFIG, _settings(replicas=2), SIZES, ample) > 400
