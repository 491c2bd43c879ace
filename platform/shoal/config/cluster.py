"""What the job runs on."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from shoal.config.section import Section


class ClusterSettings(Section):
    """``cluster``: workers, device and the fast-link domain."""

    workers: int = Field(default=1, ge=1, le=2**16)
    """Training workers, one rank each."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of every worker; ``auto`` takes CUDA where the cluster has GPUs."""

    threads_per_worker: int = Field(default=1, ge=1, le=1024)
    """CPU threads of each worker."""

    nvlink_domain: int | None = Field(default=None, ge=1)
    """Ranks that share fast links; the inner data-parallel axis stays inside. Unset: one domain
    holds all workers."""

    timeout_s: float = Field(default=60.0, gt=0)
    """Seconds after which a lost or hung peer ends a collective."""

    silence_s: float = Field(default=30.0, gt=0)
    """Seconds after which a worker whose process does not answer is named and killed."""

    straggler_s: float = Field(default=20.0, gt=0)
    """Seconds that workers wait for another before it is named, with its stack, as late."""

    max_failures: int = Field(default=3, ge=0)
    """Worker failures after which the run stops instead of resuming from its newest checkpoint."""
