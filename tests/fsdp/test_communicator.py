"""The rules that every communicator keeps, on 1 to 4 real ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from shoal.fsdp.communicator import Communicator
from shoal.fsdp.gloo import _PendingWork
from shoal.fsdp.reduction import Reduction
from shoal.fsdp.transport import Transport, communicator_for
from tests.ranks import RankPool

WORLD_SIZES = [1, 2, 3, 4]


TRANSPORTS = [Transport.GLOO, Transport.SHARED_MEMORY]


def _communicator(transport: Transport) -> Communicator:
    group = dist.group.WORLD
    assert group is not None
    return communicator_for(group, torch.device("cpu"), transport)


def _partial(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + rank)
    return torch.randn(numel, generator=generator).to(dtype)


def _expected(
    size: int, numel: int, dtype: torch.dtype, divisor: float, before: torch.Tensor | None
) -> torch.Tensor:
    total = _partial(0, numel, dtype).float()
    for rank in range(1, size):
        total = total + _partial(rank, numel, dtype).float()
    total = total / divisor
    return total if before is None else before + total


def _exact_sums(transport: Transport) -> tuple[list[float], list[float]]:
    communicator = _communicator(transport)
    size, rank = communicator.size, communicator.rank
    partial = torch.full((size * 3,), rank + 1.0)
    part, whole = torch.empty(3), torch.empty(size * 3)
    communicator.reduce_scatter(part, partial, Reduction(accumulate_dtype=torch.float32)).wait()
    communicator.all_reduce(
        whole, partial, Reduction(accumulate_dtype=torch.float32, divisor=float(size))
    ).wait()
    return part.tolist(), whole.tolist()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_sum_and_average_of_rank_scaled_data_are_exact(
    ranks: RankPool, world_size: int, transport: Transport
) -> None:
    total = world_size * (world_size + 1) / 2
    for part, whole in ranks.run(world_size, _exact_sums, transport):
        assert part == [total] * 3
        assert whole == [total / world_size] * (3 * world_size)


def _gather(transport: Transport, allocated: bool) -> list[float]:
    communicator = _communicator(transport)
    numel = communicator.size * 5
    if allocated:
        output = communicator.allocate(numel, torch.bfloat16)
        communicator.release(output)
        communicator.restore(output)
    else:
        output = torch.empty(numel, dtype=torch.bfloat16)
    shard = torch.arange(5, dtype=torch.bfloat16) + 10 * communicator.rank
    communicator.all_gather(output, shard).wait()
    values: list[float] = output.tolist()
    return values


@pytest.mark.parametrize("allocated", [False, True])
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_all_gather_fills_the_output_in_rank_order(
    ranks: RankPool, world_size: int, transport: Transport, allocated: bool
) -> None:
    expected = [10.0 * rank + i for rank in range(world_size) for i in range(5)]
    assert ranks.run(world_size, _gather, transport, allocated) == [expected] * world_size


def _reduce(
    transport: Transport, numel: int, dtype: torch.dtype, divisor: float, add: bool
) -> list[torch.Tensor]:
    communicator = _communicator(transport)
    size, rank = communicator.size, communicator.rank
    before = torch.ones(size * numel)
    part = before.chunk(size)[rank].clone()
    whole = before.clone()
    partial = _partial(rank, size * numel, dtype)
    deeds = [
        communicator.reduce_scatter(
            part, partial, Reduction(accumulate_dtype=torch.float32, divisor=divisor, add=add)
        ),
        communicator.all_reduce(
            whole, partial, Reduction(accumulate_dtype=torch.float32, divisor=divisor, add=add)
        ),
    ]
    if rank % 2:  # the order of waiting is each rank's own affair
        deeds.reverse()
    for deed in deeds:
        deed.wait()
    return [part, whole]


@pytest.mark.parametrize("numel", [1, 257, 40_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_sums_are_taken_in_rank_order_in_the_accumulation_type(
    ranks: RankPool, world_size: int, transport: Transport, dtype: torch.dtype, numel: int
) -> None:
    for divisor, add in [(1.0, False), (3.0, True)]:
        before = torch.ones(world_size * numel) if add else None
        expected = _expected(world_size, world_size * numel, dtype, divisor, before)
        results = ranks.run(world_size, _reduce, transport, numel, dtype, divisor, add)
        for rank, (part, whole) in enumerate(results):
            assert torch.equal(part, expected.chunk(world_size)[rank])
            assert torch.equal(whole, expected)


ROUTINGS = {
    "equal": [[3] * 4] * 4,
    "ragged": [[2, 0, 5, 1], [0, 3, 1, 0], [7, 7, 0, 2], [1, 0, 0, 4]],
    "nobody for the last": [[1, 2, 3, 0]] * 4,
    "first has none": [[0, 0, 0, 0], [2, 1, 1, 1], [0, 5, 0, 1], [3, 3, 3, 3]],
    "nothing at all": [[0] * 4] * 4,
    "much": [[3000, 1, 0, 7], [0, 20_000, 1, 1], [5, 5, 5, 5], [0, 0, 0, 30_000]],
}
"""How many elements go from each of four ranks to each; fewer ranks take a corner of it."""


def _exchange(transport: Transport, dtype: torch.dtype) -> list[torch.Tensor]:
    """One live communicator through every routing, and back to the first."""
    communicator = _communicator(transport)
    size, rank = communicator.size, communicator.rank
    received = []
    for counts in [*ROUTINGS.values(), ROUTINGS["equal"]]:
        counts = [row[:size] for row in counts[:size]]
        source = torch.cat(
            [_parcel(rank, to, count, dtype) for to, count in enumerate(counts[rank])]
        )
        output = torch.empty(sum(row[rank] for row in counts), dtype=dtype)
        pending = communicator.all_to_all(output, source, counts=counts)
        pending.wait()
        source.zero_()  # it may be reused
        received.append(output)
    return received


def _parcel(sender: int, receiver: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * sender + receiver)
    return torch.randn(numel, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_all_to_all_brings_ragged_and_empty_parts(
    ranks: RankPool, world_size: int, transport: Transport, dtype: torch.dtype
) -> None:
    results = ranks.run(world_size, _exchange, transport, dtype)
    for rank, received in enumerate(results):
        for counts, output in zip([*ROUTINGS.values(), ROUTINGS["equal"]], received, strict=True):
            parcels = [
                _parcel(sender, rank, counts[sender][rank], dtype) for sender in range(world_size)
            ]
            assert torch.equal(output, torch.cat(parcels))


def _all_reduce_in_place(transport: Transport, numel: int) -> torch.Tensor:
    communicator = _communicator(transport)
    buffer = _partial(communicator.rank, numel, torch.float32)
    communicator.all_reduce(buffer, buffer, Reduction(accumulate_dtype=torch.float32)).wait()
    return buffer


@pytest.mark.parametrize("numel", [7, 50_003])
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_all_reduce_works_in_place_at_any_length(
    ranks: RankPool, world_size: int, transport: Transport, numel: int
) -> None:
    expected = _expected(world_size, numel, torch.float32, 1.0, None)
    for buffer in ranks.run(world_size, _all_reduce_in_place, transport, numel):
        assert torch.equal(buffer, expected)


def _ask_under_a_profiler() -> int:
    """Ask without pause whether collectives are over that began in a recomputed region."""
    communicator = _communicator(Transport.GLOO)
    output, shard = torch.empty(communicator.size * 64), torch.ones(64)
    rounds = 300
    with (
        profile(activities=[ProfilerActivity.CPU]),
        torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
    ):
        for _ in range(rounds):
            pending = communicator.all_gather(output, shard)
            assert isinstance(pending, _PendingWork)
            while not pending.arrived:
                pass
            pending.wait()
    return rounds


def test_asking_for_the_end_blocks_nobody(ranks: RankPool) -> None:
    assert ranks.run(2, _ask_under_a_profiler) == [300, 300]
