"""What ranks that share memory can get wrong: reuse, release, death, and memory left behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time
import weakref
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shoal.errors import PeerLost, WorkError
from shoal.fsdp.communicator import Communicator
from shoal.fsdp.reduction import Reduction
from shoal.fsdp.shared_memory import SharedMemoryCommunicator
from shoal.fsdp.transport import Transport, communicator_for
from tests.ranks import RankPool

MEBIBYTE = 1 << 20


def _communicator() -> SharedMemoryCommunicator:
    group = dist.group.WORLD
    assert group is not None
    communicator = communicator_for(group, torch.device("cpu"), Transport.SHARED_MEMORY)
    assert isinstance(communicator, SharedMemoryCommunicator)
    return communicator


def _gather(communicator: Communicator, buffer: torch.Tensor, value: float) -> None:
    """Gather shards that hold ``value`` plus the rank."""
    numel = buffer.numel() // communicator.size
    shard = torch.full((numel,), value + communicator.rank, dtype=buffer.dtype)
    communicator.all_gather(buffer, shard).wait()


def _values(communicator: Communicator, buffer: torch.Tensor) -> list[float]:
    """The value of each rank's part, which must be one."""
    values = []
    for part in buffer.chunk(communicator.size):
        assert torch.equal(part, part[0].expand_as(part))
        values.append(float(part[0]))
    return values


def _read_late(persistent: bool) -> None:
    communicator = _communicator()
    size = communicator.size
    buffers = [communicator.allocate(size * 1000, torch.float32) for _ in range(3)]
    if not persistent:
        for buffer in buffers:
            communicator.release(buffer)
    for turn in range(12):
        buffer = buffers[turn % 3]
        if not persistent:
            communicator.restore(buffer)
        _gather(communicator, buffer, 10.0 * turn)
        if turn % size == communicator.rank:
            time.sleep(0.01)  # the others go on to the next gathers, into the same memory
        assert _values(communicator, buffer) == [10.0 * turn + rank for rank in range(size)]
        if not persistent:
            communicator.release(buffer)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_fast_rank_never_overwrites_what_a_slow_one_reads(
    ranks: RankPool, world_size: int, persistent: bool
) -> None:
    ranks.run(world_size, _read_late, persistent)


def _reduce_late(lent: bool) -> None:
    communicator = _communicator()
    size, rank = communicator.size, communicator.rank
    output = torch.empty(500)
    own = torch.empty(size * 500)
    for turn in range(12):
        partial = communicator.lend(size * 500, torch.float32) if lent else own
        partial.fill_(turn + rank)
        if turn % size == rank:
            time.sleep(0.01)
        communicator.reduce_scatter(
            output, partial, Reduction(accumulate_dtype=torch.float32)
        ).wait()
        assert output.tolist() == [turn * size + size * (size - 1) / 2] * 500


@pytest.mark.parametrize("lent", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
def test_partials_may_be_rewritten_after_the_wait(
    ranks: RankPool, world_size: int, lent: bool
) -> None:
    ranks.run(world_size, _reduce_late, lent)


def _many_in_flight() -> None:
    communicator = _communicator()
    size, rank = communicator.size, communicator.rank
    deeds = []
    for index in range(150):
        shard = torch.full((3,), float(index + rank))
        gathered, whole, part = torch.empty(size * 3), torch.empty(7), torch.empty(2)
        partial = communicator.lend(size * 2, torch.bfloat16).fill_(index % 50)
        deeds.append((communicator.all_gather(gathered, shard), gathered))
        deeds.append(
            (
                communicator.reduce_scatter(
                    part, partial, Reduction(accumulate_dtype=torch.float32)
                ),
                part,
            )
        )
        deeds.append(
            (
                communicator.all_reduce(
                    whole, torch.full((7,), float(index)), Reduction(accumulate_dtype=torch.float32)
                ),
                whole,
            )
        )
        if index % 40 == rank:
            time.sleep(0.01)
    for pending, _ in reversed(deeds):
        pending.wait()
    for index in range(150):
        gathered, part, whole = (result for _, result in deeds[3 * index : 3 * index + 3])
        assert gathered.tolist() == [float(index + r) for r in range(size) for _ in range(3)]
        assert part.tolist() == [index % 50 * size] * 2
        assert whole.tolist() == [index * size] * 7


@pytest.mark.parametrize("world_size", [2, 4])
def test_many_small_deeds_may_be_in_flight(ranks: RankPool, world_size: int) -> None:
    ranks.run(world_size, _many_in_flight)


def _memory_through_a_pass() -> dict[str, int]:
    communicator = _communicator()
    size = communicator.size
    at = {"start": communicator.resident_bytes}
    buffers = [communicator.allocate(4 * MEBIBYTE, torch.bfloat16) for _ in range(6)]
    views = [buffer.view(1024, -1) for buffer in buffers]
    for buffer in buffers:
        communicator.release(buffer)
    addresses = [view.data_ptr() for view in views]
    for _ in range(2):
        for index, buffer in enumerate(buffers):
            communicator.restore(buffer)
            _gather(communicator, buffer, 8.0 * index)
            assert views[index][0, 0] == 8.0 * index
            assert views[index][-1, -1] == 8.0 * index + size - 1
            if index:
                communicator.release(buffers[index - 1])
        communicator.release(buffers[-1])
    assert [view.data_ptr() for view in views] == addresses
    _barrier()
    at["resting"] = communicator.resident_bytes
    at["rss"] = _shared_rss()
    del buffers, buffer
    _barrier()
    at["viewed"] = communicator.resident_bytes
    del views
    _barrier()
    at["dead"] = communicator.resident_bytes
    return at


def _barrier() -> None:
    dist.barrier()


def _shared_rss() -> int:
    status = Path("/proc/self/smaps").read_text()
    nbytes, counts = 0, False
    for line in status.splitlines():
        if "-" in line.split(" ")[0]:
            counts = "shoal-" in line
        elif counts and line.startswith("Rss:"):
            nbytes += int(line.split()[1]) * 1024
    return nbytes


def test_released_buffers_share_the_memory_of_those_in_use(ranks: RankPool) -> None:
    for at in ranks.run(2, _memory_through_a_pass):
        buffer = 8 * MEBIBYTE
        assert at["start"] < MEBIBYTE
        assert at["resting"] < 2 * buffer + MEBIBYTE
        assert at["rss"] < 2 * buffer + MEBIBYTE
        assert at["viewed"] == at["resting"]
        assert at["dead"] < MEBIBYTE


def _memory_of_partials() -> list[int]:
    communicator = _communicator()
    output = torch.empty(MEBIBYTE // 2)
    resident = []
    for num_partials in (6, 1, 6, 1):
        partials = [communicator.lend(MEBIBYTE, torch.float32) for _ in range(num_partials)]
        for value, partial in enumerate(partials):
            partial.fill_(value)
        _barrier()
        resident.append(communicator.resident_bytes)
        for value, partial in enumerate(partials):
            communicator.reduce_scatter(
                output, partial, Reduction(accumulate_dtype=torch.float32)
            ).wait()
            assert torch.equal(output, torch.full_like(output, 2.0 * value))
        _barrier()
    return resident


def test_of_many_partials_at_once_two_keep_their_memory(ranks: RankPool) -> None:
    every_rank = 2 * 4 * MEBIBYTE
    for many, few, many_again, few_again in ranks.run(2, _memory_of_partials):
        assert 6 * every_rank <= many < 7 * every_rank
        assert few < 3 * every_rank
        assert 6 * every_rank <= many_again < 8 * every_rank
        assert few_again < 3 * every_rank


def _memory_after_the_end() -> int:
    gc.collect()  # of what other tests left in this process
    before = _shared_rss() + _num_files()
    communicator = _communicator()
    buffer = communicator.allocate(8 * MEBIBYTE, torch.float32)
    _gather(communicator, buffer, 1.0)
    partial = communicator.lend(MEBIBYTE, torch.float32).fill_(1.0)
    communicator.all_reduce(partial, partial, Reduction(accumulate_dtype=torch.float32)).wait()
    assert partial[-1] == 2.0
    assert _shared_rss() > 16 * MEBIBYTE
    del communicator
    assert buffer[0] == 1.0  # what is still referred to stays
    del buffer, partial
    gc.collect()
    return _shared_rss() + _num_files() - before


def _num_files() -> int:
    paths = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sum("shoal-" in os.readlink(path) for path in paths if path.exists())


def test_nothing_stays_when_the_communicator_and_its_buffers_go(ranks: RankPool) -> None:
    assert ranks.run(2, _memory_after_the_end) == [0, 0]


def _fork_and_go_on() -> None:
    communicator = _communicator()
    child = os.fork()
    if child == 0:
        weakref.finalize._exitfunc()  # type: ignore[attr-defined]  # what an exit would run
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    for turn in range(2):
        if turn == communicator.rank:
            time.sleep(0.3)  # long enough for the peer to look whether this rank is still there
        _gather(communicator, torch.empty(communicator.size), float(turn))


def test_a_forked_child_may_end(ranks: RankPool) -> None:
    ranks.run(2, _fork_and_go_on)


def _disagree() -> str:
    communicator = _communicator()
    numel = 8 if communicator.rank == 0 else 6
    with pytest.raises(WorkError) as error:
        communicator.all_reduce(
            torch.empty(numel), torch.ones(numel), Reduction(accumulate_dtype=torch.float32)
        ).wait()
    _barrier()
    return str(error.value)


def test_ranks_that_call_different_collectives_are_told(ranks: RankPool) -> None:
    messages = ranks.run(2, _disagree)
    assert any("disagree" in message for message in messages)


def _rank_with_a_lost_peer(
    connection: Connection, both_here: Barrier, rank: int, store: str, way: str
) -> None:
    both_here.wait(60)  # either may have been slower to import what this needs
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=3),
    )
    communicator = _communicator()
    buffer = communicator.allocate(MEBIBYTE, torch.float32)
    _gather(communicator, buffer, 1.0)
    connection.send("ready")
    if rank == 1:
        if way == "leaves":
            del communicator
        time.sleep(60)
    try:
        while True:
            _gather(communicator, buffer, 2.0)
    except PeerLost as error:
        connection.send(str(error))


@pytest.mark.parametrize(
    ("way", "message"),
    [("killed", "ended"), ("leaves", "gave up or ended"), ("hangs", "did not answer within 3 s")],
)
def test_a_lost_peer_ends_the_wait(tmp_path: Path, way: str, message: str) -> None:
    context = multiprocessing.get_context("spawn")
    ours, processes, both_here = [], [], context.Barrier(2)
    for rank in range(2):
        mine, theirs = context.Pipe()
        process = context.Process(
            target=_rank_with_a_lost_peer,
            args=(theirs, both_here, rank, str(tmp_path / "store"), way),
        )
        process.start()
        theirs.close()
        ours.append(mine)
        processes.append(process)
    try:
        assert [connection.recv() for connection in ours] == ["ready", "ready"]
        if way == "killed":
            pid = processes[1].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
        assert ours[0].poll(20)
        assert message in ours[0].recv()
    finally:
        for process in processes:
            process.kill()
            process.join()
    # Other programs keep files here as well.
    assert not [path for path in Path("/dev/shm").iterdir() if path.name.startswith("shoal")]
