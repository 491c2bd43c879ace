"""Measurements side by side with other ways to do the same."""

from shoal.bench.checkpoint import CheckpointBenchSetup, bench_checkpoint
from shoal.bench.checkpoint_report import CheckpointReport, Round
from shoal.bench.engine import bench_engine
from shoal.bench.engine_report import EngineCase, EngineReport
from shoal.bench.engine_setup import EngineBenchSetup, Load
from shoal.bench.report import BenchCase, BenchReport
from shoal.bench.train import BenchSetup, bench_train

__all__ = [
    "BenchCase",
    "BenchReport",
    "BenchSetup",
    "CheckpointBenchSetup",
    "CheckpointReport",
    "EngineBenchSetup",
    "EngineCase",
    "EngineReport",
    "Load",
    "Round",
    "bench_checkpoint",
    "bench_engine",
    "bench_train",
]
