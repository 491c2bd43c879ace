"""Measurements side by side with other ways to do the same."""

from shoal.bench.report import BenchCase, BenchReport
from shoal.bench.train import BenchSetup, bench_train

__all__ = ["BenchCase", "BenchReport", "BenchSetup", "bench_train"]
