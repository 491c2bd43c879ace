"""This process during a run: its device, its threads, its kernels and its randomness."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def device_of(kind: str) -> torch.device:
    """The device of this rank, ``cpu`` or the current GPU."""
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def seed_rank(seed: int, rank: int, step: int) -> None:
    """Seed torch's generators: another stream for each run, rank and starting step."""
    digest = hashlib.blake2b(f"{seed}/{rank}/{step}".encode(), digest_size=8).digest()
    torch.manual_seed(int.from_bytes(digest, "little") >> 1)  # torch takes 63 bits


@contextmanager
def kernel_settings(*, threads: int, deterministic: bool) -> Iterator[None]:
    """Threads and determinism of torch's kernels in this process, put back afterwards."""
    settings: Any = torch.utils.deterministic  # whose own setting is a property of the module
    before = (
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        settings.fill_uninitialized_memory,
    )
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    # Strictness would also fill every buffer that is about to be overwritten.
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        torch.use_deterministic_algorithms(before[1])
        settings.fill_uninitialized_memory = before[2]
