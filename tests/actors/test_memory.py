"""Whether the ranks of a size fit into the nodes of a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from shoal.plan import Machine, Plan, RankMemory, make_plan
from shoal_actors.driver import Cluster
from shoal_actors.train.memory import memory_lack
from tests.training.tiny import make_config, write_text

WORKER = {"CPU": 1.0}


def _plan(folder: Path) -> Plan:
    write_text(folder / "text.txt")
    config = make_config(folder, cluster={"workers": 2}, train={"global_batch": 2})
    return make_plan(config, Machine(has_cuda=False, cpu_has_bf16=False))


def _lack(plan: Plan, worker: Mapping[str, float], *nodes: Mapping[str, float]) -> str | None:
    return memory_lack(plan, Cluster(is_own=False, nodes=nodes, limit=None), worker)


def test_ranks_of_one_node_share_its_memory(tmp_path: Path) -> None:
    plan = _plan(tmp_path)
    assert plan.saves is not None and plan.saves.num_copies == 2
    need = float(max(m.peak + plan.saves.copy_bytes([m.rank]) for m in plan.memory))
    assert _lack(plan, WORKER, {"CPU": 8.0, "memory": 2 * need}) is None
    lack = _lack(plan, WORKER, {"CPU": 8.0, "memory": 2 * need - 2})
    assert lack is not None and lack.startswith("with 2 workers, rank 0 needs ")
    # One rank alone may be all that a node has room for; one without room gets none.
    assert (
        _lack(plan, WORKER, *[{"CPU": 1.0, "memory": need}] * 2, {"CPU": 0.0, "memory": 1.0})
        is None
    )
    assert _lack(plan, WORKER, {"CPU": 8.0}) is None, "nobody said"


def test_a_gpu_has_what_its_kind_has(tmp_path: Path) -> None:
    plan = replace(_plan(tmp_path), device="cuda")
    node = {"CPU": 8.0, "GPU": 8.0, "memory": 1e9}
    worker = {"CPU": 1.0, "GPU": 1.0}
    assert _lack(plan, worker, {**node, "accelerator_type:H100": 1.0}) is None
    assert _lack(plan, worker, {**node, "accelerator_type:V1": 1.0}) is None
    huge = replace(plan, memory=tuple(_times(rank, 10**9) for rank in plan.memory))
    lack = _lack(huge, worker, {**node, "accelerator_type:H100": 1.0})
    assert lack is not None and "67.1 GiB is what there is for each" in lack
    # Copies for saves are in the memory of the host.
    lack = _lack(plan, worker, {**node, "accelerator_type:H100": 1.0, "memory": 100.0})
    assert lack is not None and "of its host's memory for copies for saves, and 50 B is" in lack


def _times(rank: RankMemory, factor: int) -> RankMemory:
    return replace(rank, num_bytes={kind: factor * size for kind, size in rank.num_bytes.items()})
