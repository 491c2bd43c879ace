"""Proof, at load, that a row's bits do not depend on its company.

Each kernel that a model uses is run, in its own shape and with its own weights, on fixed rows: each
row alone, rows in batches of many sizes, in order and shuffled, on one thread and on several. Every
row must have the same bits every time. The outputs also go into a fingerprint: two machines whose
fingerprints differ must not promise the same bits for each other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from shoal.ops.fixed.compiling import source_hash
from shoal.ops.fixed.probes import NUM_ROWS, Probe, uniform
from shoal.ops.fixed.tiles import HAS_BF16_PRODUCTS
from shoal.ops.on_threads import on_threads

ROW_COUNTS = (1, 2, 3, 7, 8, 16, 17, 33, 64)
"""Batches that are tried."""

_ALONE = 12
"""Rows that are tried alone."""

_THREADED = (1, 7, 64)
"""Batches that are tried on several threads too: a task is always computed by one of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelProof:
    """What was found of one kernel."""

    name: str
    """Kernel, kind and shape."""
    row_counts: tuple[int, ...]
    """Batches of rows in which every row had its bits, up to the first that failed."""
    failure: str | None
    """The first case in which a row's bits differed; None if there was none."""

    @property
    def passed(self) -> bool:
        """Whether no case differed."""
        return self.failure is None


@dataclass(frozen=True, kw_only=True, slots=True)
class Certificate:
    """What was proven of a model's kernels on this machine."""

    kernels: tuple[KernelProof, ...]
    threads: tuple[int, ...]
    """Numbers of threads that were tried."""
    fingerprint: str
    """16 hexadecimal digits; equal if the kernels gave the same bits for the same inputs."""
    bf16_products: bool
    """Whether the CPU multiplies bf16 numbers itself."""

    @property
    def passed(self) -> bool:
        """Whether every kernel keeps its promise."""
        return all(kernel.passed for kernel in self.kernels)

    @property
    def failures(self) -> tuple[str, ...]:
        """A sentence for each kernel that does not."""
        return tuple(f"{k.name}: {k.failure}" for k in self.kernels if k.failure is not None)


def certify_kernels(probes: Sequence[Probe]) -> Certificate:
    """Run ``probes``, each name once, and tell what they prove; a failure is no exception."""
    distinct = {probe.name: probe for probe in probes}
    threads = (1, max(torch.get_num_threads(), 2))
    digest = hashlib.sha256(source_hash().encode())
    proofs = []
    for name, probe in distinct.items():
        with on_threads(1):
            expected = probe.compute(torch.arange(NUM_ROWS))
        digest.update(name.encode())
        digest.update(_bits(expected).numpy().tobytes())
        proofs.append(_prove(probe, _bits(expected), threads))
    return Certificate(
        kernels=tuple(proofs),
        threads=threads,
        fingerprint=digest.hexdigest()[:16],
        bf16_products=HAS_BF16_PRODUCTS,
    )


def _prove(probe: Probe, expected: torch.Tensor, threads: tuple[int, ...]) -> KernelProof:
    proven: list[int] = []
    for count in ROW_COUNTS:
        for sort, rows, number in _batches(count, threads):
            with on_threads(number):
                result = probe.compute(rows)
            differs = (_bits(result) != expected[rows]).flatten(1).any(1)
            if bool(differs.any()):
                row = int(rows[differs][0])
                failure = f"row {row} differs in a batch of {count}, {sort}, {number} thread(s)"
                return KernelProof(name=probe.name, row_counts=tuple(proven), failure=failure)
        proven.append(count)
    return KernelProof(name=probe.name, row_counts=tuple(proven), failure=None)


def _batches(count: int, threads: tuple[int, ...]) -> Iterator[tuple[str, torch.Tensor, int]]:
    """Batches of ``count`` rows in words, in numbers, and on how many threads to run them."""
    if count == 1:
        for row in range(0, NUM_ROWS, NUM_ROWS // _ALONE):
            yield "alone", torch.tensor([row]), threads[0]
    else:
        start = (NUM_ROWS - count) // 2
        yield "in order", torch.arange(start, start + count), threads[0]
    for number in threads:
        if number == threads[0] or count in _THREADED:
            shuffled = uniform(torch.arange(NUM_ROWS), count + number).argsort()[:count]
            yield "shuffled", shuffled, number


def _bits(values: torch.Tensor) -> torch.Tensor:
    """The bits of bf16 or fp32 numbers as integers; all that are no number have the same."""
    values = values.where(~values.isnan(), float("nan")).contiguous()
    return values.view(torch.int16 if values.element_size() == 2 else torch.int32)
