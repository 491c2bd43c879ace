"""What each Ray Train worker runs: the loop of the platform, with its errors put into words."""

from __future__ import annotations

import os
import socket
from contextlib import nullcontext

import ray
import torch.distributed as dist

from shoal.errors import ConfigError
from shoal.training import EventKind, TrainJob, TrainResult, append_event, train
from shoal_actors.train.cut import Cut, CutWatch
from shoal_actors.train.domains import check_domains
from shoal_actors.train.failure import describe
from shoal_actors.train.farewell import is_told
from shoal_actors.train.pulse import Pulse
from shoal_actors.train.rank_log import rank_log

LOGS_FOLDER = "logs"
"""Where, in a run's folder, each rank logs."""


def work(job: TrainJob, cut: Cut) -> TrainResult:
    """Train on this worker's rank, until ``cut`` is ordered or any rank told to end by SIGTERM;
    raises RankFailed whatever went wrong."""
    rank = dist.get_rank()
    try:
        _check_shared(job, rank)
        logs = job.folder.path / LOGS_FOLDER
        with rank_log(logs / f"rank-{rank}.log"), Pulse(logs, rank) as pulse:
            _announce(job, rank)
            # One rank asks for all: the others hear of it in the step that it makes.
            with CutWatch(cut) if rank == 0 else nullcontext() as watch:

                def told() -> bool:
                    return is_told() or (watch is not None and watch.is_told())

                result = train(job, pulse.reached, told)
            if result.is_cut and is_told():
                append_event(job.folder.path, EventKind.NOTICE, cause=f"SIGTERM to rank {rank}")
            dist.destroy_process_group()
            return result
    except Exception as error:  # the edge of the process: the driver gets it in plain values
        raise describe(rank, error) from None


def _check_shared(job: TrainJob, rank: int) -> None:
    if not job.folder.path.is_dir():
        raise ConfigError(
            "run.dir",
            job.config.run.dir,
            f"rank {rank}, on {socket.gethostname()}, does not see the run's folder",
            "Use a folder that all nodes share",
        )


def _announce(job: TrainJob, rank: int) -> None:
    """Note who takes part in this attempt, after a look at where the ranks landed."""
    own = (ray.get_runtime_context().get_node_id(), socket.gethostname(), os.getpid())
    places: list[tuple[str, str, int]] = [own] * dist.get_world_size()
    dist.all_gather_object(places, own)
    check_domains([node for node, _, _ in places], job.config.cluster.nvlink_domain)
    if rank == 0:
        workers = [
            {"rank": each, "node": node, "host": host, "pid": pid}
            for each, (node, host, pid) in enumerate(places)
        ]
        append_event(job.folder.path, EventKind.START, workers=workers)
