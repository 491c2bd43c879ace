"""Which communicator an axis gets, and that the one for GPUs keeps the rules as well."""

from __future__ import annotations

import logging
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from shoal.fsdp.gloo import GlooCommunicator
from shoal.fsdp.host import NotShared
from shoal.fsdp.nccl import NcclCommunicator
from shoal.fsdp.reduction import Reduction
from shoal.fsdp.shared_memory import SharedMemoryCommunicator
from shoal.fsdp.transport import Transport, communicator_for
from tests.ranks import COLLECTIVE_TIMEOUT_S, RankPool
from tests.short_disk import file_size_limit

CPU = torch.device("cpu")


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _chosen() -> tuple[str, str]:
    pair = dist.new_group([0, 1])
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    assert isinstance(communicator_for(alone, CPU, Transport.SHARED_MEMORY), GlooCommunicator)
    return (
        type(communicator_for(pair, CPU, Transport.AUTO)).__name__,
        type(communicator_for(pair, CPU, Transport.GLOO)).__name__,
    )


def test_ranks_of_one_host_share_memory(ranks: RankPool) -> None:
    expected = (SharedMemoryCommunicator.__name__, GlooCommunicator.__name__)
    assert ranks.run(2, _chosen) == [expected] * 2


def _timeouts_s() -> list[float]:
    axis = dist.new_group([0, 1])
    if dist.get_rank() == 2:
        return []
    before = axis._get_backend(CPU).options._timeout.total_seconds()
    communicator_for(axis, CPU)
    return [before, axis._get_backend(CPU).options._timeout.total_seconds()]


def test_an_axis_waits_as_long_as_the_default_group(ranks: RankPool) -> None:
    for before, after in ranks.run(3, _timeouts_s)[:2]:
        assert before != after == COLLECTIVE_TIMEOUT_S


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def _chosen_where_rank_zero_may_not_create_files() -> tuple[str, list[str]]:
    lines = _Lines()
    logger = logging.getLogger("shoal.fsdp.transport")
    logger.addHandler(lines)
    try:
        with file_size_limit(2**20) if dist.get_rank() == 0 else nullcontext():
            chosen = type(communicator_for(_world(), CPU, Transport.AUTO)).__name__
            with pytest.raises(NotShared, match="rank 0 of the axis cannot create shared memory"):
                communicator_for(_world(), CPU, Transport.SHARED_MEMORY)
    finally:
        logger.removeHandler(lines)
    return chosen, lines.messages


def test_without_shared_memory_all_ranks_use_sockets_and_one_says_so(ranks: RankPool) -> None:
    results = ranks.run(2, _chosen_where_rank_zero_may_not_create_files)
    assert [chosen for chosen, _ in results] == [GlooCommunicator.__name__] * 2
    (message,) = results[0][1]
    assert message.startswith("an axis of 2 ranks uses sockets: rank 0 of the axis cannot create")
    assert results[1][1] == []


def _by_the_group_itself() -> list[list[float]]:
    # The calls are those of any process group, so gloo's stands in for NCCL's.
    communicator = NcclCommunicator(_world(), CPU)
    size, rank = communicator.size, communicator.rank
    gathered = communicator.allocate(size, torch.float32)
    communicator.release(gathered)
    communicator.restore(gathered)
    communicator.all_gather(gathered, torch.tensor([float(rank)])).wait()
    partial = communicator.lend(size * 2, torch.bfloat16).fill_(rank + 1)
    part, whole = torch.ones(2), torch.empty(size * 2)
    scattered = communicator.reduce_scatter(
        part, partial, Reduction(accumulate_dtype=torch.float32, divisor=2.0, add=True)
    )
    scattered.wait()
    reduced = communicator.all_reduce(
        whole, partial, Reduction(accumulate_dtype=torch.float32, divisor=4.0)
    )
    reduced.wait()
    assert partial.tolist() == [rank + 1] * (size * 2)
    return [gathered.tolist(), part.tolist(), whole.tolist()]


def test_the_communicator_for_gpus_sums_then_divides_then_adds(ranks: RankPool) -> None:
    expected = [[0.0, 1.0, 2.0], [4.0] * 2, [1.5] * 6]
    assert ranks.run(3, _by_the_group_itself) == [expected] * 3
