"""Kernels as such: arguments, kept code, and a place to keep it that cannot be written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.ops.fixed.kernel import Kernel, bits, kernel
from shoal.ops.fixed.memory import float_of, read_float, read_int, write_float, write_int
from shoal.ops.on_threads import on_threads


@kernel(3, "test_scale")
def _scale(task: Any, thread: Any, a: Any) -> None:
    write_float(a[1] + task * 4, read_float(a[0] + task * 4) * float_of(a[2]))


@kernel(2, "test_count")
def _count(task: Any, thread: Any, a: Any) -> None:
    write_int(a[0] + task * 8, read_int(a[0] + task * 8) + 1)
    write_int(a[1] + task * 8, thread)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_each_task_is_run_once_by_one_of_the_threads(number: int) -> None:
    runs, by = torch.zeros(1000, dtype=torch.int64), torch.full((1000,), -1)
    with on_threads(number):
        _count(1000, runs.data_ptr(), by.data_ptr())
        _count(0, 0, 0)
    assert runs.eq(1).all()
    assert 0 <= int(by.min()) <= int(by.max()) < number


def test_arguments_arrive() -> None:
    x, y = torch.randn(100), torch.empty(100)
    _scale(100, x.data_ptr(), y.data_ptr(), bits(0.1))
    assert torch.equal(y, x * 0.1)
    with pytest.raises(AssertionError, match=r"test_scale takes 3 arguments"):
        _scale(1, 0)


SCRIPT = """
import logging, sys
logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.INFO)
import numba.core.caching, torch
from shoal.ops.fixed import swiglu
hits = []
load = numba.core.caching.IndexDataCacheFile.load
def counted(self, key):
    found = load(self, key)
    hits.append(found is not None)
    return found
numba.core.caching.IndexDataCacheFile.load = counted
print(swiglu(torch.zeros(1), torch.ones(1)).item(), sorted(set(hits)))
"""


def run(folder: Path, script: str = SCRIPT) -> str:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(folder)}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_compiled_code_is_kept_and_found_again(tmp_path: Path) -> None:
    said, result = run(tmp_path).splitlines()
    assert said.startswith("compiling the kernels for this CPU") and result == "0.0 [False]"
    assert run(tmp_path) == "0.0 [True]"


def test_a_place_that_cannot_be_written_is_told_and_costs_only_time(tmp_path: Path) -> None:
    read_only = """
import tempfile
def refuse(*arguments, **keywords):
    raise OSError("read-only file system")
tempfile.TemporaryFile = refuse
"""
    output = run(tmp_path, read_only + SCRIPT)
    assert "kernel swiglu is compiled at every start" in output and output.endswith("0.0 []")


def test_a_kernel_is_named() -> None:
    assert isinstance(_scale, Kernel) and _scale.name == "test_scale"
