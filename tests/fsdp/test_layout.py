"""Where tensors lie in a flat buffer: known layouts, and any shapes (A1)."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ConfigError
from shoal.fsdp import GlobalLayout

SHAPES = st.lists(
    st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple), min_size=1, max_size=8
)


@pytest.mark.parametrize(
    ("shapes", "num_ranks", "offsets", "size"),
    [
        ([(5, 4), (2, 6), (3,)], 2, (0, 24, 20), 48),
        ([(4, 4), (1, 6)], 2, (0, 18), 24),
        ([(2, 6), (4, 4), (4, 4), (1, 2), (1, 6)], 5, (0, 12, 32, 28, 48), 60),
    ],
)
def test_known_layouts(
    shapes: list[tuple[int, ...]], num_ranks: int, offsets: tuple[int, ...], size: int
) -> None:
    layout = GlobalLayout.build(shapes, num_ranks)
    assert layout.offsets == offsets
    assert layout.size == size


def test_rows_of_each_rank() -> None:
    layout = GlobalLayout.build([(2, 6), (4, 4), (4, 4), (1, 2), (1, 6)], 5)
    shard = layout.size // 5
    num_rows = []
    for rank in range(5):
        rows = [layout.rows(i, rank * shard, (rank + 1) * shard) for i in range(5)]
        num_rows.append([r.stop - r.start for r in rows])
    assert num_rows == [
        [2, 0, 0, 0, 0],
        [0, 3, 0, 0, 0],
        [0, 1, 1, 1, 0],
        [0, 0, 3, 0, 0],
        [0, 0, 0, 0, 1],
    ]


def test_outer_axes_cut_the_part_of_the_inner_axis() -> None:
    layout = GlobalLayout.build([(24,)], 6)
    runs = {
        (outer, inner): layout.run((True, True), (2, 3), (outer, inner))
        for outer in range(2)
        for inner in range(3)
    }
    for (outer, inner), (start, stop) in runs.items():
        assert start == inner * (24 // 3) + outer * (24 // 6)
        assert stop - start == 24 // 6
    assert layout.run((False, True), (2, 3), (1, 2)) == (16, 24)
    assert layout.run((False, False), (2, 3), (1, 2)) == (0, 24)


@pytest.mark.parametrize("shape", [(), (3, 0), (2, 0, 4)])
def test_tensors_without_rows_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="rows"):
        GlobalLayout.build([(4,), shape], 2)


@given(shapes=SHAPES, num_ranks=st.integers(1, 6))
def test_no_overlap_no_split_row_nothing_lost(
    shapes: list[tuple[int, ...]], num_ranks: int
) -> None:
    layout = GlobalLayout.build(shapes, num_ranks)
    shard = layout.size // num_ranks
    assert layout.size % num_ranks == 0
    taken: set[int] = set()
    for index, shape in enumerate(shapes):
        row = math.prod(shape[1:])
        span = range(layout.offsets[index], layout.offsets[index] + math.prod(shape))
        assert layout.offsets[index] % row == 0
        assert span.stop <= layout.size
        assert taken.isdisjoint(span)
        taken.update(span)
        next_row = 0
        for rank in range(num_ranks):
            rows = layout.rows(index, rank * shard, (rank + 1) * shard)
            if rows.stop > rows.start:
                assert rows.start == next_row
                place = rank * shard + rows.offset
                assert place == layout.offsets[index] + rows.start * row
                next_row = rows.stop
        assert next_row == shape[0]


@given(
    shapes=st.lists(st.tuples(st.integers(1, 200), st.integers(1, 9)), min_size=1, max_size=6),
    num_ranks=st.integers(1, 7),
    block_rows=st.sampled_from([2, 32]),
)
def test_blocks_of_rows_stay_together(
    shapes: list[tuple[int, int]], num_ranks: int, block_rows: int
) -> None:
    layout = GlobalLayout.build(shapes, num_ranks, block_rows=block_rows)
    shard = layout.size // num_ranks
    taken: list[tuple[int, int]] = []
    for index, shape in enumerate(shapes):
        held = [layout.rows(index, r * shard, (r + 1) * shard) for r in range(num_ranks)]
        covered = [row for rows in held for row in range(rows.start, rows.stop)]
        assert covered == list(range(shape[0]))
        for rows in held:
            if rows.stop > rows.start:
                assert rows.start % block_rows == 0
                assert rows.stop % block_rows == 0 or rows.stop == shape[0]
        taken.append((layout.offsets[index], layout.offsets[index] + math.prod(shape)))
    taken.sort()
    assert all(end <= start for (_, end), (start, _) in zip(taken, taken[1:], strict=False))
