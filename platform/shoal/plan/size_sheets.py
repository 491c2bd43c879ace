"""The sizes of a run as a sheet of text and as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoal.config import Config
from shoal.plan.machine import Machine
from shoal.plan.plan import Plan
from shoal.plan.rates import Rates
from shoal.plan.sheet import MOST_ROWS, Sheet, bytes_text
from shoal.plan.sizes import Sizes, plan_at, sizes_of


def sizes_shown(
    config: Config, machine: Machine, rates: Rates | None
) -> tuple[dict[str, Any], tuple[Sheet, ...]]:
    """What there is to show of the sizes of ``config``; nothing where it has one."""
    if len(config.cluster.sizes) == 1:
        return {}, ()
    sizes = sizes_of(config)
    plans = [plan_at(config, size, machine, rates=rates) for size in sizes.feasible]
    return {"sizes": sizes_as_dict(sizes, plans)}, (sizes_sheet(sizes, plans),)


def sizes_sheet(sizes: Sizes, plans: Sequence[Plan]) -> Sheet:
    """What each feasible size needs, the largest first; ``plans`` are those of ``sizes``."""
    is_memory_known = any(plan.memory_bytes is not None for plan in plans)
    rows = [
        (
            str(plan.topology.world_size),
            str(plan.topology.data),
            f"{plan.batches.num_microbatches} x {plan.batches.micro_batch}",
            bytes_text(plan.fullest.at_rest),
            bytes_text(plan.fullest.peak),
            *(("" if plan.fits else "too much",) if is_memory_known else ()),
        )
        for plan in reversed(plans)
    ]
    header = ("workers", "data-parallel", "sequences of each", "at rest", "at peak")
    notes = ["A run takes the largest that the cluster has room for."]
    if len(rows) > MOST_ROWS:
        notes.append(f"{len(rows) - MOST_ROWS} more below; --json lists them all.")
    if sizes.refused:
        size, problem = list(sizes.refused.items())[-1]
        others = f"{len(sizes.refused)} others do"
        if len(sizes.refused) == 1:
            others = "Another does"
        notes.append(f"{others} not divide: with {size}, {problem}.")
    return Sheet(
        title="Workers",
        header=(*header, "memory") if is_memory_known else header,
        rows=tuple(rows[:MOST_ROWS]),
        numeric=frozenset(range(5)),
        note=" ".join(notes),
    )


def sizes_as_dict(sizes: Sizes, plans: Sequence[Plan]) -> dict[str, Any]:
    """Plain values for JSON."""
    return {
        "feasible": [
            {
                "workers": plan.topology.world_size,
                "data": plan.topology.data,
                "num_microbatches": plan.batches.num_microbatches,
                "at_rest_bytes": plan.fullest.at_rest,
                "peak_bytes": plan.fullest.peak,
                "fits": plan.fits,
            }
            for plan in plans
        ],
        "refused": {str(size): problem for size, problem in sizes.refused.items()},
    }
