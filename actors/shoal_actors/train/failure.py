"""Which of several ranks' errors is the cause, and whether another attempt can cure it.

One rank's failure makes its peers fail: their collectives break. So of the errors that arrive
together, those of broken collectives are consequences unless nothing else is there.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch.distributed import DistError

from shoal.errors import ConfigError, PeerLost, ShoalError, Unavailable, WorkError
from shoal_actors.train.death import PROCESS_DIED, death_of


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureReport:
    """One rank's failure in plain values, fit to cross processes and to be written down."""

    rank: int | None
    """The rank that failed; None where a worker failed before it had one."""

    kind: str
    """The exception's class, or how a rank ended that raised none."""

    message: str
    """The exception's message."""

    traceback: str
    """The exception with the traceback of its process; what Ray knows where that is gone."""

    is_consequence: bool
    """Whether a peer's failure explains it."""

    is_final: bool
    """Whether the same would happen again, so that another attempt is in vain."""

    def as_record(self) -> dict[str, Any]:
        """Its fields, for ``events.jsonl``."""
        return asdict(self)


class RankFailed(Exception):
    """What a worker raises in place of any exception: a report that every process can unpickle."""

    def __init__(self, report: FailureReport, refusal: ConfigError | None = None) -> None:
        self.report = report
        self.refusal = refusal
        super().__init__(f"{report.kind}: {report.message}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.report, self.refusal)


class AttemptFailed(WorkError):
    """An attempt of a gang failed; ``report`` is the cause."""

    def __init__(self, report: FailureReport, refusal: ConfigError | None = None) -> None:
        """``refusal`` is what a worker has refused, if that was the cause."""
        self.report = report
        self.refusal = refusal
        super().__init__(report.message)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.report, self.refusal)


def describe(rank: int, error: BaseException) -> RankFailed:
    """The failure of this process's rank."""
    is_consequence = any(_is_broken_collective(cause) for cause in _chain(error))
    return RankFailed(
        FailureReport(
            rank=rank,
            kind=type(error).__name__,
            message=str(error),
            traceback="".join(traceback.format_exception(error)),
            is_consequence=is_consequence,
            is_final=isinstance(error, ShoalError)
            and not isinstance(error, Unavailable)
            and not is_consequence,
        ),
        error if isinstance(error, ConfigError) else None,
    )


def first_cause(failures: Mapping[int, BaseException]) -> RankFailed:
    """Of the ranks that failed at about the same time, the one to show.

    Raises ValueError where there is none.
    """
    described = [_as_rank_failed(rank, error) for rank, error in sorted(failures.items())]
    if not described:
        raise ValueError("no rank failed")
    return min(described, key=lambda failed: failed.report.is_consequence)


def last_word(
    last: FailureReport, failures: Sequence[Mapping[str, Any]], max_failures: int, logs: Path
) -> str:
    """The message of a run that is given up.

    ``last`` ended it, ``failures`` are the records of those since the newest checkpoint, oldest
    first. A final failure is its own explanation; of the others the first is told, with its
    traceback, for later ones may only follow from it.
    """
    first = failures[0] if failures and not last.is_final else last.as_record()
    cause = in_words(first)
    if last.is_final:
        return f"{cause}\nMore in {logs}."
    times = (
        f"The run failed {len(failures)} times without a new checkpoint"
        f" (cluster.max_failures = {max_failures})"
    )
    return f"{first['traceback']}{times}, first so: {cause}\nMore in {logs}."


def in_words(record: Mapping[str, Any]) -> str:
    """Who failed, and how, of a report's record."""
    who = "A worker" if record["rank"] is None else f"Rank {record['rank']}"
    return f"{who} failed. {record['kind']}: {record['message']}"


def not_started(error: BaseException) -> FailureReport:
    """The report on a gang of which a worker was lost before it had a rank."""
    return FailureReport(
        rank=None,
        kind=PROCESS_DIED,
        message="it was lost before it began",
        traceback=f"{error}\n",
        is_consequence=False,
        is_final=False,
    )


def controller_lost(error: BaseException) -> FailureReport:
    """The report on a gang whose controller, and with it every worker, was lost."""
    death = death_of(error)
    return FailureReport(
        rank=None,
        kind=death.kind,
        message=f"the one that watches the others was lost: {death.message}",
        traceback=f"{death.details}\n",
        is_consequence=False,
        is_final=False,
    )


def _as_rank_failed(rank: int, error: BaseException) -> RankFailed:
    if isinstance(error, RankFailed):
        return error
    death = death_of(error)  # Ray's own error: the process could not describe itself
    return RankFailed(
        FailureReport(
            rank=rank,
            kind=death.kind,
            message=death.message,
            traceback=f"{death.details}\n",
            is_consequence=False,
            is_final=False,
        )
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    """What led to an error, each once: one that is raised a second time may lead to itself."""
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        seen.append(cause)
        yield cause
        cause = cause.__cause__ or cause.__context__


def _is_broken_collective(error: BaseException) -> bool:
    """Gloo has no exception of its own: its transport names itself in the text."""
    is_gloo = isinstance(error, RuntimeError) and "gloo" in str(error)
    return is_gloo or isinstance(error, DistError | PeerLost)
