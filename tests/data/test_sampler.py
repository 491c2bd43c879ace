"""One global order of sequences, the same at every size."""

from __future__ import annotations

import itertools
import json
import logging
from collections import Counter

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from shoal.data import Sampler, rank_share
from shoal.data.permutation import permute
from shoal.errors import ConfigError, WorkError
from tests.ranks import RankPool


def _ids(sampler: Sampler, steps: int) -> list[list[int]]:
    return [next(sampler).tolist() for _ in range(steps)]


@given(size=st.integers(1, 3000), key=st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 100)))
def test_a_permutation_is_one(size: int, key: tuple[int, int]) -> None:
    order = permute(np.arange(size), size, key)
    assert sorted(order.tolist()) == list(range(size))
    backwards = permute(np.arange(size)[::-1], size, key)
    assert backwards.tolist() == order.tolist()[::-1]


def test_the_order_is_the_same_for_ever() -> None:
    """A run that goes on under another release must find its order again."""
    assert permute(np.arange(10), 10, (0, 0)).tolist() == [4, 7, 6, 1, 5, 0, 3, 2, 9, 8]
    assert permute(np.array([0, 10**12 - 1]), 10**12, (2**63 - 1, 7)).tolist() == [
        601316741534,
        569521334423,
    ]


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_every_order_of_few_things_is_about_as_likely(size: int) -> None:
    draws = 3000
    orders = Counter(
        tuple(permute(np.arange(size), size, (seed, 0)).tolist()) for seed in range(draws)
    )
    possible = list(itertools.permutations(range(size)))
    expected = draws / len(possible)
    chi_squared = sum((orders[order] - expected) ** 2 / expected for order in possible)
    degrees = len(possible) - 1
    assert chi_squared < degrees + 5 * (2 * degrees) ** 0.5  # five standard deviations


def test_neighbours_do_not_stay_neighbours() -> None:
    size = 4096
    order = permute(np.arange(size), size, (1, 2))
    assert np.mean(np.abs(np.diff(order))) == pytest.approx(size / 3, rel=0.05)
    assert np.corrcoef(np.arange(size), order)[0, 1] == pytest.approx(0, abs=0.05)
    other = permute(np.arange(size), size, (1, 3))
    assert np.sum(order == other) < 10


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_each_id_once_an_epoch_and_disjoint_over_ranks(size: int) -> None:
    sampler = Sampler(24, 12, seed=5, fingerprint="data")
    for _ in range(3):
        shares = [
            rank_share(ids, r, size) for ids in (next(sampler), next(sampler)) for r in range(size)
        ]
        assert sorted(np.concatenate(shares).tolist()) == list(range(24))


@given(
    num_sequences=st.integers(1, 40),
    global_batch=st.integers(1, 50),
    epochs=st.none() | st.integers(1, 4),
    is_shuffled=st.booleans(),
)
def test_the_order_is_epoch_after_epoch(
    num_sequences: int, global_batch: int, epochs: int | None, is_shuffled: bool
) -> None:
    if epochs is not None and epochs * num_sequences < global_batch:
        return
    sampler = Sampler(
        num_sequences, global_batch, seed=1, shuffle=is_shuffled, epochs=epochs, fingerprint="data"
    )
    steps = 3 * num_sequences // global_batch + 1 if epochs is None else 10**9
    batches = [ids.tolist() for ids in itertools.islice(sampler, steps)]
    assert all(len(batch) == global_batch for batch in batches)
    stream = list(itertools.chain.from_iterable(batches))
    for start in range(0, len(stream) - num_sequences + 1, num_sequences):
        epoch = stream[start : start + num_sequences]
        assert sorted(epoch) == list(range(num_sequences))
        assert is_shuffled or epoch == sorted(epoch)
    if epochs is not None:
        assert len(batches) == epochs * num_sequences // global_batch
        assert sampler.batches_left == 0


@given(
    before=st.integers(0, 9),
    first_size=st.sampled_from([1, 2, 3, 4]),
    second_size=st.sampled_from([1, 2, 3, 4]),
    is_shuffled=st.booleans(),
)
def test_a_restored_sampler_goes_on_at_any_size(
    before: int, first_size: int, second_size: int, is_shuffled: bool
) -> None:
    """Fault 56: the state of 2 ranks, loaded at 1 or 4, must not lose positions."""

    def make() -> Sampler:
        return Sampler(31, 12, seed=9, shuffle=is_shuffled, fingerprint="data")

    expected = _ids(make(), 12)
    writers = [make() for _ in range(first_size)]
    seen = [
        [i for rank, w in enumerate(writers) for i in rank_share(next(w), rank, first_size)]
        for _ in range(before)
    ]
    states = [json.loads(json.dumps(writer.state_dict())) for writer in writers]
    assert all(state == states[0] for state in states)
    readers = [make() for _ in range(second_size)]
    for reader in readers:
        reader.load_state_dict(states[0])
        assert reader.consumed == before * 12
    seen += [
        [i for rank, r in enumerate(readers) for i in rank_share(next(r), rank, second_size)]
        for _ in range(before, 12)
    ]
    assert seen == expected


def test_a_restored_sampler_may_take_other_batches() -> None:
    """The order is of sequences: what follows does not depend on how many a step takes."""
    small, large = (
        Sampler(10, 2, seed=3, fingerprint="data"),
        Sampler(10, 5, seed=3, fingerprint="data"),
    )
    _ids(small, 5)
    large.load_state_dict(small.state_dict())
    whole = sum(_ids(Sampler(10, 10, seed=3, fingerprint="data"), 2), [])
    assert sum(_ids(large, 2), []) == whole[10:]


@pytest.mark.parametrize(
    ("num_sequences", "seed", "is_shuffled", "fingerprint", "field"),
    [
        (30, 9, True, "data", "data"),
        (31, 9, True, "other", "data"),
        (31, 8, True, "data", "run.seed"),
        (31, 9, False, "data", "data.shuffle"),
    ],
)
def test_a_state_of_something_else_is_refused(
    num_sequences: int, seed: int, is_shuffled: bool, fingerprint: str, field: str
) -> None:
    state = Sampler(31, 4, seed=9, fingerprint="data").state_dict()
    sampler = Sampler(num_sequences, 4, seed=seed, shuffle=is_shuffled, fingerprint=fingerprint)
    untouched = sampler.state_dict()
    with pytest.raises(ConfigError) as refusal:
        sampler.load_state_dict(state)
    assert refusal.value.field == field
    assert sampler.state_dict() == untouched
    del state["offset"]
    with pytest.raises(WorkError, match="sampler's state"):
        sampler.load_state_dict(state)


def test_batches_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 data-parallel ranks") as refusal:
        rank_share(np.arange(4), 0, 3)
    assert refusal.value.field == "train.global_batch"
    with pytest.raises(ConfigError, match="at most 10") as refusal:
        Sampler(5, 11, seed=0, epochs=2, fingerprint="data")
    assert refusal.value.field == "train.global_batch"


def test_what_is_repeated_or_left_over_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        Sampler(5, 8, seed=0, fingerprint="data")
        assert "some twice" in caplog.text
        Sampler(5, 2, seed=0, epochs=1, fingerprint="data")
        assert "last 1 sequences fill no batch" in caplog.text


def _train_until_the_data_ends() -> tuple[list[list[int]], int]:
    """What one rank sees of 5 sequences in batches of 2, with a collective in each step."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sampler = Sampler(5, size, seed=4, epochs=1, fingerprint="data")
    gathered: list[list[int]] = []
    steps = 0
    for ids in sampler:
        parts: list[list[int]] = [[] for _ in range(size)]
        dist.all_gather_object(parts, rank_share(ids, rank, size).tolist())
        gathered.append(sum(parts, []))
        steps += 1
    return gathered, steps


def test_ranks_read_different_sequences_and_end_together(ranks: RankPool) -> None:
    """Faults 58 and 59: all ranks stop at one step, and no two draw the same samples."""
    results = ranks.run(2, _train_until_the_data_ends)
    assert results[0] == results[1]
    gathered, steps = results[0]
    assert steps == 2
    assert len(set(itertools.chain.from_iterable(gathered))) == 4
    assert gathered == _ids(Sampler(5, 2, seed=4, fingerprint="data"), 2)
