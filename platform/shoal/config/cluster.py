"""What the job runs on."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from shoal.config.section import Section, in_vain, refuse
from shoal.errors import ConfigError


class ClusterSettings(Section):
    """``cluster``: workers, device and the fast-link domain."""

    workers: int = Field(default=1, ge=1, le=2**16)
    """Training workers, one rank each."""

    workers_min: int | None = Field(default=None, ge=1, le=2**16)
    """Fewest workers to go on with while the cluster has no room for more; unset: ``workers``."""

    workers_max: int | None = Field(default=None, ge=1, le=2**16)
    """Most workers to grow to where the cluster has room; unset: ``workers``."""

    grow_after_s: float = Field(default=300.0, gt=0)
    """Seconds that workers train before they are stopped, after a saved step, to go on as more of
    them. They are not stopped if the rest of the run takes less than that."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of every worker; ``auto`` takes CUDA where the cluster has GPUs."""

    threads_per_worker: int = Field(default=1, ge=1, le=1024)
    """CPU threads of each worker."""

    nvlink_domain: int | None = Field(default=None, ge=1)
    """Ranks that share fast links; the inner data-parallel axis stays inside. Unset: one domain
    holds all workers."""

    timeout_s: float = Field(default=60.0, gt=0)
    """Seconds after which a collective gives up on a lost or hung peer."""

    silence_s: float = Field(default=30.0, gt=0)
    """Seconds after which a worker whose process does not answer is named and killed."""

    straggler_s: float = Field(default=20.0, gt=0)
    """Seconds that workers wait for another one before it is reported as late, with its stack."""

    notice_s: float = Field(default=25.0, ge=0)
    """Seconds that workers have to make one more step and save it when the command is told to end;
    the default is the 30 of a Kubernetes pod, less what the rest takes."""

    max_failures: int = Field(default=3, ge=0)
    """Failures in a row, without a new checkpoint between them, after which the run stops instead
    of resuming from its newest checkpoint."""

    @property
    def sizes(self) -> range:
        """The numbers of workers that the run may have."""
        return range(self.workers_min or self.workers, (self.workers_max or self.workers) + 1)

    @model_validator(mode="after")
    def _workers_are_between_their_bounds(self) -> ClusterSettings:
        found: list[ConfigError] = []
        if self.workers_min is not None and self.workers_min > self.workers:
            problem = f"is more than cluster.workers = {self.workers}"
            remedy = f"Give at most {self.workers}"
            found.append(ConfigError("workers_min", self.workers_min, problem, remedy))
        if self.workers_max is not None and self.workers_max < self.workers:
            problem = f"is less than cluster.workers = {self.workers}"
            remedy = f"Give at least {self.workers}"
            found.append(ConfigError("workers_max", self.workers_max, problem, remedy))
        if not found and len(self.sizes) == 1:
            problem = f"the run never has fewer workers than {self.workers} to grow from"
            remedy = "Leave it out, or set cluster.workers_min or cluster.workers_max"
            found += in_vain(self, ("grow_after_s",), problem, remedy)
        refuse(found)
        return self
