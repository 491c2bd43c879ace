"""What a comparison of training steps found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchCase:
    """One way of ours beside one of theirs, in turns on the same ranks."""

    ours: str
    theirs: str

    sequences: int
    """Per rank and step."""

    tokens: int
    """Per sequence."""

    ranks: int

    our_steps_s: tuple[float, ...]
    """Time of a step, one for each round."""

    their_steps_s: tuple[float, ...]
    """In the same rounds."""

    alone_steps_s: tuple[float, ...]
    """The same ranks, the same compute, nothing sent; in the same rounds."""

    @property
    def our_tokens_per_s(self) -> float:
        """All ranks together, median of the rounds."""
        return self._tokens_per_s(self.our_steps_s)

    @property
    def their_tokens_per_s(self) -> float:
        """All ranks together, median of the rounds."""
        return self._tokens_per_s(self.their_steps_s)

    @property
    def ratio(self) -> float:
        """Our tokens/s over theirs: median of the rounds' ratios."""
        pairs = zip(self.our_steps_s, self.their_steps_s, strict=True)
        return median(theirs / ours for ours, theirs in pairs)

    def _tokens_per_s(self, steps_s: tuple[float, ...]) -> float:
        return self.ranks * self.sequences * self.tokens / median(steps_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """All cases of one run."""

    model: str
    """What was trained."""

    cases: tuple[BenchCase, ...]

    def json(self) -> dict[str, Any]:
        """Plain values, with every round."""
        derived = [
            {
                "our_tokens_per_s": case.our_tokens_per_s,
                "their_tokens_per_s": case.their_tokens_per_s,
                "ratio": case.ratio,
            }
            for case in self.cases
        ]
        cases = zip(self.cases, derived, strict=True)
        return {"model": self.model, "cases": [asdict(case) | more for case, more in cases]}

    def text(self) -> str:
        """A table for people."""
        head = ("tokens a rank", "ours", "ms", "theirs", "ms", "nothing sent", "tokens/s")
        rows = [head, *(_row(case) for case in self.cases)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([self.model, "", *lines])


def _row(case: BenchCase) -> tuple[str, ...]:
    def milliseconds(steps_s: tuple[float, ...]) -> str:
        return f"{1e3 * median(steps_s):.0f}"

    return (
        f"{case.sequences} x {case.tokens}",
        case.ours,
        milliseconds(case.our_steps_s),
        case.theirs,
        milliseconds(case.their_steps_s),
        milliseconds(case.alone_steps_s),
        f"{case.our_tokens_per_s:.0f} / {case.their_tokens_per_s:.0f} = {case.ratio:.2f}",
    )
