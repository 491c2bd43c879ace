"""Which sizes of a run would not fit into the memory of a cluster's nodes, as far as it is known.

A rank of a smaller gang holds more of the model, and copies more of it for a save. What a node has,
Ray says; of a GPU it says the kind, and its datasheet the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shoal.plan import GPUS, Plan, bytes_text, gpu_rates
from shoal_actors.driver import Cluster, num_fitting

KIND = "accelerator_type:"
"""How Ray names the resource that stands for a kind of GPU."""


def memory_lack(plan: Plan, cluster: Cluster, worker: Mapping[str, float]) -> str | None:
    """Why the ranks of ``plan`` do not fit, in words; None where nothing speaks against them."""
    at_peak = [memory.peak for memory in plan.memory]
    copies = [plan.saves.copy_bytes([rank]) if plan.saves else 0 for rank in range(len(at_peak))]
    nodes = [node for node in cluster.nodes if num_fitting(node, worker)]
    hosts = _memory_of_hosts(plan, nodes, worker)
    if plan.device == "cuda":
        needs = [
            (at_peak, "of its GPU's memory at its peak", _memory_of_gpus(nodes)),
            (copies, "of its host's memory for copies for saves", hosts),
        ]
    else:
        both = [sum(each) for each in zip(at_peak, copies, strict=True)]
        with_copies = ", copies for saves included" if any(copies) else ""
        needs = [(both, f"of memory at its peak{with_copies}", hosts)]
    for sizes, what, memory in needs:
        need, most = max(sizes), min(memory, default=None)
        if most is not None and need > most:
            return (
                f"with {plan.topology.world_size} workers, rank {sizes.index(need)} needs "
                f"{bytes_text(need)} {what}, and {bytes_text(most)} is what there is for each"
            )
    return None


def _memory_of_hosts(
    plan: Plan, nodes: Sequence[Mapping[str, float]], worker: Mapping[str, float]
) -> list[int]:
    """Bytes for each rank, of every node that says what it has."""
    places = (min(num_fitting(node, worker), plan.topology.world_size) for node in nodes)
    each = zip(nodes, places, strict=True)
    return [int(node["memory"] / ranks) for node, ranks in each if "memory" in node]


def _memory_of_gpus(nodes: Sequence[Mapping[str, float]]) -> list[int]:
    """Bytes of a GPU, of every node whose kind is known."""
    names = (name.removeprefix(KIND) for node in nodes for name in node if name.startswith(KIND))
    found = (gpu_rates(kind).memory_bytes for kind in names if kind in GPUS)
    return [size for size in found if size is not None]
