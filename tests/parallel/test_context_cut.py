"""How sequences are cut, and which sequences cannot be."""

from __future__ import annotations

import pytest
import torch

from shoal.errors import ConfigError
from shoal.parallel.context import SequenceCut


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("length", [14, 15, 16, 17, 65, 257, 258, 260])
def test_every_token_has_one_rank_and_ranks_differ_by_one_token(length: int, size: int) -> None:
    cut = SequenceCut(length=length, size=size)
    tokens = torch.arange(length).unsqueeze(0)
    parts = [cut.take(tokens, rank)[0].tolist() for rank in range(size)]
    assert sorted(token for part in parts for token in part) == list(range(length))
    assert max(map(len, parts)) == cut.longest
    assert cut.longest - min(map(len, parts)) <= 1
    for rank, part in enumerate(parts):
        runs = cut.runs(rank)
        for run in runs:
            assert part[run.part(run.start, run.stop)] == list(range(run.start, run.stop))
        # one chunk of the first half and its mirror image in the second
        assert runs[0].stop <= runs[1].start
        assert abs(runs[0].start - (length - runs[1].stop)) <= 2 * size


@pytest.mark.parametrize("length", [64, 257, 1023])
def test_ranks_see_about_equally_many_keys(length: int) -> None:
    cut = SequenceCut(length=length, size=4)
    seen = [sum(p + 1 for r in cut.runs(rank) for p in range(r.start, r.stop)) for rank in range(4)]
    assert max(seen) - min(seen) <= 2 * length


def test_a_sequence_without_a_token_for_each_chunk_is_refused() -> None:
    SequenceCut(length=8, size=4)
    with pytest.raises(ConfigError, match="8 chunks.*at least 8") as caught:
        SequenceCut(length=7, size=4)
    assert (caught.value.field, caught.value.value) == ("data.seq_len", 7)
