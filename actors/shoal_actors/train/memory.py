"""Which sizes of a run would not fit into the memory of a cluster's nodes, as far as it is known.

A rank of a smaller gang holds more of the model. What a node of CPUs has, Ray says; of a GPU it
says the kind, and its datasheet the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shoal.plan import GPUS, Plan, bytes_text, gpu_rates
from shoal_actors.driver import Cluster, num_fitting

KIND = "accelerator_type:"
"""How Ray names the resource that stands for a kind of GPU."""


def memory_lack(plan: Plan, cluster: Cluster, worker: Mapping[str, float]) -> str | None:
    """Why the ranks of ``plan`` do not fit, in words; None where nothing speaks against them."""
    most = min(_memory_of_ranks(plan, cluster, worker), default=None)
    if most is None or plan.fullest.peak <= most:
        return None
    return (
        f"with {plan.topology.world_size} workers, rank {plan.fullest.rank} needs "
        f"{bytes_text(plan.fullest.peak)} of memory at its peak, and {bytes_text(most)} is what "
        "there is for each"
    )


def _memory_of_ranks(plan: Plan, cluster: Cluster, worker: Mapping[str, float]) -> Iterator[int]:
    """Bytes for each rank, of every node that may have some."""
    for node in cluster.nodes:
        places = min(num_fitting(node, worker), plan.topology.world_size)
        if not places:
            continue
        if plan.device == "cuda":
            kinds = (name.removeprefix(KIND) for name in node if name.startswith(KIND))
            memory = (gpu_rates(kind).memory_bytes for kind in kinds if kind in GPUS)
            yield from (size for size in memory if size is not None)
        elif "memory" in node:
            yield int(node["memory"] / places)
