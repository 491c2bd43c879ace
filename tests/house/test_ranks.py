"""The pool of rank processes itself."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankFailure, RankPool


def _sum_of_ranks(offset: int) -> float:
    value = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(value)
    return value.item()


def _fail_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise RuntimeError("scripted")


def test_jobs_of_several_sizes_share_the_processes(ranks: RankPool) -> None:
    assert ranks.run(2, _sum_of_ranks, 1) == [3.0, 3.0]
    assert ranks.run(1, _sum_of_ranks, 5) == [5.0]


def test_a_failing_rank_is_named() -> None:
    pool = RankPool()
    try:
        with pytest.raises(RankFailure, match="rank 1:[^$]*scripted"):
            pool.run(2, _fail_on_rank_one)
    finally:
        pool.close()
