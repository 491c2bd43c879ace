"""What serving over HTTP costs beside the engine alone, in one run."""

from shoal_deployments.bench.report import FirstTokens, Pauses, ServeCase, ServeReport
from shoal_deployments.bench.run import bench_serve
from shoal_deployments.bench.setup import ServeBenchSetup

__all__ = [
    "FirstTokens",
    "Pauses",
    "ServeBenchSetup",
    "ServeCase",
    "ServeReport",
    "bench_serve",
]
