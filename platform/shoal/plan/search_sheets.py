"""What a search found as sheets of text and as plain values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shoal.config import Config
from shoal.plan.candidates import Candidate
from shoal.plan.plan import Plan
from shoal.plan.search import Found
from shoal.plan.sheet import Sheet, bytes_text, seconds_text
from shoal.plan.sheets import memory_sheet, time_sheet


def search_sheets(found: Found, config: Config) -> Iterator[Sheet]:
    """The best layouts, why the best is that, why others were refused, and how to take it."""
    candidate, plan = found.best[0]
    yield _best(found)
    yield time_sheet(plan)
    yield memory_sheet(plan)
    yield _refused(found)
    yield Sheet(
        title="To take the best layout",
        header=("",),
        rows=((settings_text(candidate, config),),),
        numeric=frozenset(),
    )


def settings_text(candidate: Candidate, config: Config) -> str:
    """The ``--set`` options that make ``config`` have the layout; what it has is left out."""
    values = changed_settings(candidate, config)
    words = ((key, "null" if value is None else value) for key, value in values.items())
    return " ".join(f"--set {key}={value}" for key, value in words) or "nothing: it is the file's"


def changed_settings(candidate: Candidate, config: Config) -> dict[str, Any]:
    """Keys of the layout whose values are others in ``config``."""
    tree = config.model_dump(mode="json")
    changed = {}
    for key, value in candidate.overrides().items():
        place = tree
        for part in key.split("."):
            place = place[part]
        if place != value:
            changed[key] = value
    return changed


def found_as_dict(found: Found, config: Config) -> dict[str, Any]:
    """Plain values for JSON."""
    return {
        "best": [
            {
                "layout": candidate.overrides(),
                "set": changed_settings(candidate, config),
                "at_rest_bytes": plan.fullest.at_rest,
                "peak_bytes": plan.fullest.peak,
                "bubble_share": plan.bubble_share,
                "sent_bytes": [dict(sent) for sent in plan.sent],
                "time": None if plan.time is None else plan.time.as_dict(),
            }
            for candidate, plan in found.best
        ],
        "candidates": found.num_candidates,
        "slower": found.num_slower,
        "memory_bytes": found.memory_bytes,
        "refused": [
            {"field": key[0], "problem": key[1], "count": count, "example": example}
            for key, count, example in found.reasons.rows()
        ],
    }


def _best(found: Found) -> Sheet:
    rows = tuple(
        _row(number, candidate, plan)
        for number, (candidate, plan) in enumerate(found.best, start=1)
    )
    first = found.best[0][1]
    assert first.rates is not None
    header = (
        "",
        "layout",
        "step",
        "tokens/s",
        "at rest",
        "at peak",
        "computing",
        "waiting",
        "bubble",
    )
    return Sheet(
        title=f"Best layouts of {first.name} on {first.topology.world_size} x {first.rates.name}",
        header=header,
        rows=rows,
        numeric=frozenset({0, *range(2, len(header))}),
        note=f"Of {found.num_candidates:,} layouts that fit together; {found.num_slower:,} of them "
        f"are slower than these, however they shard. A step may fill "
        f"{bytes_text(found.memory_bytes)} of each device (--memory). Levels are outer/inner.",
    )


def _row(number: int, candidate: Candidate, plan: Plan) -> tuple[str, ...]:
    time = plan.time
    assert time is not None
    waiting = time.exchange_s + time.weights_s + time.gradients_s + time.messages_s
    return (
        str(number),
        candidate.words,
        seconds_text(time.total_s),
        f"{time.tokens_per_s:,.0f}",
        bytes_text(plan.fullest.at_rest),
        bytes_text(plan.fullest.peak),
        f"{time.compute_s / time.total_s:.0%}",
        f"{waiting / time.total_s:.0%}",
        f"{time.bubble_s / time.total_s:.0%}",
    )


def _refused(found: Found) -> Sheet:
    return Sheet(
        title="Refused",
        header=("layouts", "for example"),
        rows=tuple((f"{count:,}", example) for _, count, example in found.reasons.rows()),
        numeric=frozenset({0}),
    )
