"""Finding out whether the ranks of a group share a host, and a first piece of memory if they do."""

from __future__ import annotations

import os
import platform
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

from shoal.errors import PeerLost
from shoal.fsdp.board import Board
from shoal.fsdp.memory_file import MemoryFile, MemoryFileAddress

_ORDERED_STORES = ("x86_64", "AMD64")
"""Processors on which a counter is never seen raised before the data that it stands for."""

_Item = TypeVar("_Item")


class NotShared(Exception):
    """Why the ranks of a group cannot share memory; the same on every rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Memory that every rank of a group maps, and the board to agree by."""

    file: MemoryFile
    board: Board
    rank: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where a process lives; processes of one place can open each other's memory."""

    machine: str
    boot: str
    process_namespace: str
    user: int

    @classmethod
    def here(cls) -> _Place:
        """This process's place; raises ``OSError`` where the system does not say."""
        return cls(
            machine=platform.machine(),
            boot=Path("/proc/sys/kernel/random/boot_id").read_text(),
            process_namespace=os.readlink("/proc/self/ns/pid"),
            user=os.getuid(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Introduction:
    """What a rank tells the others first."""

    pid: int
    place: _Place | None
    file: MemoryFileAddress | None
    problem: str | None


def join_host_memory(group: ProcessGroup, timeout_s: float) -> HostMemory:
    """Memory shared by all ranks of ``group``; called by all of them at once.

    A rank that waits on the board longer than ``timeout_s`` gives up.

    Raises:
        NotShared: on every rank, if one of them cannot take part.
        PeerLost: if one is lost meanwhile.
    """
    rank, size = group.rank(), group.size()
    file, introduction = _introduce(rank)
    introductions = _exchange(group, introduction)
    _check_places(introductions)
    processes: dict[int, int] = {}
    problem = None
    try:
        if file is None:
            address = introductions[0].file
            assert address is not None, "rank 0 brings the file"
            file = MemoryFile.open(address)
        for peer, introduced in enumerate(introductions):
            if peer != rank:
                processes[peer] = os.pidfd_open(introduced.pid)
        board = Board(file, rank, processes, timeout_s)
    except OSError as error:
        for descriptor in processes.values():
            os.close(descriptor)
        problem = f"rank {rank} of the axis cannot open the memory of rank 0 ({error})"
    _raise_first(_exchange(group, problem))
    assert file is not None
    return HostMemory(file=file, board=board, rank=rank, size=size)


def _introduce(rank: int) -> tuple[MemoryFile | None, _Introduction]:
    file: MemoryFile | None = None
    place: _Place | None = None
    problem = None
    try:
        place = _Place.here()
        if rank == 0:
            file = MemoryFile.create(f"shoal-{uuid.uuid4().hex}")
    except (OSError, AttributeError) as error:  # no /proc, or a system without such files
        problem = f"rank {rank} of the axis cannot create shared memory ({error})"
    address = file.address if file is not None else None
    return file, _Introduction(pid=os.getpid(), place=place, file=address, problem=problem)


def _check_places(introductions: list[_Introduction]) -> None:
    _raise_first([introduction.problem for introduction in introductions])
    first = introductions[0].place
    assert first is not None
    if first.machine not in _ORDERED_STORES:
        raise NotShared(f"{first.machine} processors do not order their stores")
    for rank, introduction in enumerate(introductions):
        if introduction.place != first:
            raise NotShared(f"rank {rank} of the axis lives on another host, or apart from rank 0")


def _raise_first(problems: list[str | None]) -> None:
    for problem in problems:
        if problem is not None:
            raise NotShared(problem)


def _exchange(group: ProcessGroup, item: _Item) -> list[_Item]:
    items: list[_Item] = [item] * group.size()
    try:
        dist.all_gather_object(items, item, group=group)
    except RuntimeError as error:
        raise PeerLost(f"The ranks of an axis could not find each other: {error}") from error
    return items
