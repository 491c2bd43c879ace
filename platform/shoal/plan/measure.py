"""Rates of the CPUs of this machine, measured in about a second."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from types import MappingProxyType

import torch

from shoal.config import Config
from shoal.memory import available_bytes
from shoal.ops.on_threads import on_threads
from shoal.plan.rates import Link, Rates

_MEASURED_S = 0.15
_SIZE = 512
_COPIED_BYTES = 2**26


def measured_rates(config: Config) -> Rates:
    """What each of the run's workers attains if all of them share this machine's cores.

    Ranks of one host talk through memory, so both classes of links are a copy within it.
    """
    workers, threads = config.cluster.workers, config.cluster.threads_per_worker
    share = min(1.0, (os.cpu_count() or 1) / (workers * threads))
    with on_threads(threads):
        flops = {dtype: share * _flops(dtype) for dtype in (torch.float32, torch.bfloat16)}
        memory = share * _copied_bytes_per_s()
    link = Link(bytes_per_s=memory / 2, latency_s=100e-6)  # written by one rank, read by another
    return Rates(
        name="CPU",
        flops=MappingProxyType(flops),
        memory_bytes_per_s=memory,
        inside=link,
        outside=link,
        domain=None,
        memory_bytes=available_bytes() // workers,
        source=f"measured here, {workers} workers of {threads} threads sharing the cores",
    )


def _flops(dtype: torch.dtype) -> float:
    left, right = (torch.ones(_SIZE, _SIZE, dtype=dtype) for _ in range(2))
    return 2 * _SIZE**3 * _per_second(lambda: left @ right)


def _copied_bytes_per_s() -> float:
    source = torch.ones(_COPIED_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * _COPIED_BYTES * _per_second(lambda: target.copy_(source))


def _per_second(work: Callable[[], object]) -> float:
    work()
    start, count = time.perf_counter(), 0
    while (passed := time.perf_counter() - start) < _MEASURED_S:
        work()
        count += 1
    return count / passed
