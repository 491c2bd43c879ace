"""What a comparison of serving engines found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from shoal.bench.engine_setup import Load


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCase:
    """One load on one model; seconds of each round, contenders in turn."""

    model: str
    load: Load
    fixed_s: tuple[float, ...]
    """Ours, every answer in fixed order."""
    vendor_s: tuple[float, ...]
    """Ours without that promise."""
    theirs_s: tuple[float, ...] | None
    """The other engine, if there was one."""

    @property
    def tokens_per_s(self) -> float:
        """Ours in fixed order, median of the rounds."""
        return self.load.counted_tokens / median(self.fixed_s)

    @property
    def speed_of_vendor(self) -> float:
        """Ours in fixed order beside ours without: above 1 it is faster. Median of the rounds."""
        return _ratio(self.vendor_s, self.fixed_s)

    @property
    def speed_of_theirs(self) -> float | None:
        """Ours in fixed order beside the other engine: above 1 ours is faster."""
        return None if self.theirs_s is None else _ratio(self.theirs_s, self.fixed_s)


def _ratio(others: tuple[float, ...], ours: tuple[float, ...]) -> float:
    return median(other / own for other, own in zip(others, ours, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """All cases of one run."""

    against: str | None
    """Name and version of the other engine."""
    threads: int
    cases: tuple[EngineCase, ...]

    def json(self) -> dict[str, Any]:
        """Plain values, with every round."""
        cases = [
            asdict(case)
            | {
                "tokens_per_s": case.tokens_per_s,
                "to_vendor": case.speed_of_vendor,
                "to_theirs": case.speed_of_theirs,
            }
            for case in self.cases
        ]
        return {"against": self.against, "threads": self.threads, "cases": cases}

    def text(self) -> str:
        """A table for people."""
        head = ["model", "load", "tokens/s", "to ours without fixed order"]
        if self.against is not None:
            head.append(f"to {self.against}")
        rows = [head]
        for case in self.cases:
            speed = f"{case.tokens_per_s:.0f}"
            row = [case.model, case.load.name, speed, f"{case.speed_of_vendor:.2f}"]
            if case.speed_of_theirs is not None:
                row.append(f"{case.speed_of_theirs:.2f}")
            rows.append(row)
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([f"bf16, greedy, {self.threads} threads", "", *lines])
