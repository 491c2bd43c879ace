"""Whether the memory of each host will do, looked at by all ranks before a run allocates any.

Anonymous memory is given out before it exists: a host that runs out of it kills a process, at the
first save if copies for saves are what was too much. What is counted is certain to be needed, so
what is refused cannot work.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from shoal.config import Config
from shoal.errors import Misplaced
from shoal.memory import available_bytes
from shoal.plan import plan_rank
from shoal.training.job import TrainJob

PATIENCE_S = 10.0
"""How long processes of an earlier attempt may take to let go of their memory."""

_LOOK_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostNeeds:
    """Bytes that one rank needs of the host that it is on."""

    host: str
    at_rest: int
    """Weights, gradients and moments; 0 where they are on a GPU."""
    copies: int
    """Copies for saves."""
    free: int
    """What the host can still give, to all of its ranks."""


def check_memory(job: TrainJob) -> None:
    """Refuse hosts whose memory cannot hold what their ranks keep; every rank calls it.

    Raises Misplaced on all ranks alike.
    """
    rank = dist.get_rank()
    at_rest, copies = plan_rank(job.config, job.precision, job.device, rank)
    deadline = time.monotonic() + PATIENCE_S
    while True:
        own = HostNeeds(
            host=socket.gethostname(),
            at_rest=at_rest if job.device == "cpu" else 0,
            copies=copies,
            free=available_bytes(),
        )
        needs = [own] * dist.get_world_size()
        dist.all_gather_object(needs, own)
        problem = refusal(job.config, needs)
        if problem is None:
            return
        is_over = [time.monotonic() > deadline]
        dist.broadcast_object_list(is_over, src=0)
        if is_over[0]:
            raise problem
        time.sleep(_LOOK_S)


def refusal(config: Config, needs: Sequence[HostNeeds]) -> Misplaced | None:
    """What speaks against a run whose ranks have such ``needs``, if anything."""
    for host in dict.fromkeys(need.host for need in needs):
        ranks = [need for need in needs if need.host == host]
        at_rest, copies = sum(r.at_rest for r in ranks), sum(r.copies for r in ranks)
        free = min(need.free for need in ranks)
        where = f"on {host}, where {free:,} are free for {len(ranks)} of the {len(needs)} ranks"
        if at_rest > free:
            return Misplaced(
                "cluster.workers",
                config.cluster.workers,
                f"weights, gradients and moments take {at_rest:,} bytes {where}",
                "Use fewer workers on a node, nodes of more memory, or another sharding.*",
            )
        if at_rest + copies > free:
            beside = f" beside {at_rest:,} of weights, gradients and moments" if at_rest else ""
            return Misplaced(
                "checkpoint.asynchronous",
                True,
                f"copies for saves take {copies:,} bytes{beside} {where}",
                "Set it to false to save without copies, or use nodes of more memory",
            )
    return None
