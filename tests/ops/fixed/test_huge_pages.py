"""Memory in huge pages: zeros of any shape, whatever the system has."""

from __future__ import annotations

import gc
import mmap
from pathlib import Path

import pytest
import torch

from shoal.ops.fixed.huge_pages import zeros

MEBIBYTE = 2**20


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(0, 3), (5, 7), (3, 1025, 1031)])
def test_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    made = zeros(shape, dtype)
    gc.collect()
    assert made.shape == shape and made.dtype == dtype and made.is_contiguous()
    assert not made.any()
    made.fill_(1)
    assert made.sum(dtype=torch.int64) == made.numel()
    if made.nbytes >= 2 * MEBIBYTE:
        assert made.data_ptr() % (2 * MEBIBYTE) == 0


def resident_bytes() -> int:
    """Memory that this process has in fact."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="Linux tells it here")
def test_memory_is_taken_as_it_is_written() -> None:
    before = resident_bytes()
    made = zeros((1024, MEBIBYTE), torch.uint8)
    made[-1] = 1
    assert resident_bytes() - before < 64 * MEBIBYTE
    made = zeros((1,), torch.uint8)  # the first is given back
    gc.collect()
    assert resident_bytes() - before < 16 * MEBIBYTE


def test_systems_that_know_of_no_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    made = zeros((4, MEBIBYTE), torch.uint8)
    assert made.shape == (4, MEBIBYTE) and not made.any()
