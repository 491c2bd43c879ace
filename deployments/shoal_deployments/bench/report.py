"""What serving over HTTP cost."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeCase:
    """So many streams at once, of the engine alone and over HTTP; one value for each round."""

    way: str
    """Which server: a name of ``ServeBenchSetup.ways``."""
    streams: int
    new_tokens: int
    """Of each stream."""
    alone_s: tuple[float, ...]
    http_s: tuple[float, ...]

    @property
    def alone_tokens_per_s(self) -> float:
        """The engine alone, median of the rounds."""
        return self.streams * self.new_tokens / median(self.alone_s)

    @property
    def http_tokens_per_s(self) -> float:
        """What clients receive, median of the rounds."""
        return self.streams * self.new_tokens / median(self.http_s)

    @property
    def ratio(self) -> float:
        """Share of the engine's tokens/s that clients receive: median of the rounds' ratios."""
        return median(alone / http for alone, http in zip(self.alone_s, self.http_s, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstTokens:
    """Seconds to the first token of requests that come one after the other, in turns."""

    way: str
    alone_s: tuple[float, ...]
    http_s: tuple[float, ...]

    @property
    def overhead_s(self) -> float:
        """What HTTP adds: difference of the medians."""
        return median(self.http_s) - median(self.alone_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pauses:
    """The longest time between two pieces of one stream, in each round."""

    way: str
    prompt_tokens: int
    """Of a text that another client sends meanwhile."""
    alone_s: tuple[float, ...]
    """Of a stream that nobody disturbs."""
    beside_s: tuple[float, ...]
    """While the text is tokenized."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeReport:
    """All of one run."""

    model: str
    """What was served, and how."""
    cases: tuple[ServeCase, ...]
    first_tokens: tuple[FirstTokens, ...]
    pauses: tuple[Pauses, ...]

    def json(self) -> dict[str, Any]:
        """Plain values, with every round."""
        return {
            "model": self.model,
            "cases": [
                asdict(case)
                | {
                    "alone_tokens_per_s": case.alone_tokens_per_s,
                    "http_tokens_per_s": case.http_tokens_per_s,
                    "ratio": case.ratio,
                }
                for case in self.cases
            ],
            "first_tokens": [
                asdict(each) | {"overhead_s": each.overhead_s} for each in self.first_tokens
            ],
            "pauses": [asdict(each) for each in self.pauses],
        }

    def text(self) -> str:
        """Tables for people."""
        return "\n\n".join([self.model, *map(_table, self._tables())])

    def _tables(self) -> list[list[tuple[str, ...]]]:
        streams: list[tuple[str, ...]] = [
            ("streams", "over", "engine alone", "clients get", "share")
        ]
        for case in self.cases:
            speeds = (case.alone_tokens_per_s, case.http_tokens_per_s)
            shown = (f"{speed:.0f} tokens/s" for speed in speeds)
            streams.append((str(case.streams), case.way, *shown, f"{case.ratio:.2f}"))
        firsts: list[tuple[str, ...]] = [
            ("first token over", "engine alone", "at the client", "added")
        ]
        for first in self.first_tokens:
            times = median(first.alone_s), median(first.http_s), first.overhead_s
            firsts.append((first.way, *map(_milliseconds, times)))
        lengths = {f"{pause.prompt_tokens:,}" for pause in self.pauses}
        beside = f"beside a prompt of {', '.join(lengths)} tokens"
        pauses: list[tuple[str, ...]] = [("longest pause over", "undisturbed", beside)]
        for pause in self.pauses:
            longest = median(pause.alone_s), median(pause.beside_s)
            pauses.append((pause.way, *map(_milliseconds, longest)))
        return [streams, firsts, pauses]


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms"


def _table(rows: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
