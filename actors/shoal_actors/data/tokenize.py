"""Tokenize shards as Ray Data tasks.

    from_items(shards) ──▶ map(tokenize one shard, one CPU each, `workers` at a time) ──▶ results

A shard's tokens go straight to the shared folder that the function names; only small results pass
through Ray. A mistake of the user (a ShoalError) travels back as a value, since Ray Data would wrap
an exception in its own and log it; the first one in the shards' order is raised, so the message
does not depend on which task was faster.
"""

from __future__ import annotations

import logging
import pickle
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray.data

from shoal.data import Shard, ShardFunction, ShardResult, run_locally
from shoal.errors import ShoalError


@dataclass(frozen=True, kw_only=True, slots=True)
class RayDataRunner:
    """A ``shoal.data.ShardRunner`` on the Ray that this process is connected to."""

    workers: int
    """Tasks side by side; each reserves one CPU."""

    def __call__(self, function: ShardFunction, shards: Sequence[Shard]) -> list[ShardResult]:
        """Call ``function`` on each shard; ShoalError of the first shard that has one."""
        if len(shards) == 1:
            return run_locally(function, shards)  # Ray Data would add only its start-up
        with _quiet_console(), ray.data.DataContext.current(_quiet_context()):
            rows = (
                ray.data.from_items(
                    [{"shard": pickle.dumps(shard)} for shard in shards],
                    override_num_blocks=len(shards),
                )
                .map(
                    _tokenize_row,
                    fn_args=[function],
                    num_cpus=1,
                    compute=ray.data.TaskPoolStrategy(size=self.workers),
                )
                .take_all()
            )
        outcomes = sorted(
            (pickle.loads(row["outcome"]) for row in rows), key=lambda outcome: outcome.number
        )
        return [outcome.result() for outcome in outcomes]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Outcome:
    """How one shard ended."""

    number: int
    value: ShardResult | ShoalError

    def result(self) -> ShardResult:
        if isinstance(self.value, ShoalError):
            raise self.value
        return self.value


@contextmanager
def _quiet_console() -> Iterator[None]:
    """Keep Ray Data's announcements to its log file; its errors still reach the terminal."""
    consoles = [
        (handler, handler.level)
        for handler in logging.getLogger("ray.data").handlers
        if handler.name == "console"
    ]
    for handler, _ in consoles:
        handler.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for handler, level in consoles:
            handler.setLevel(level)


def _quiet_context() -> ray.data.DataContext:
    """Ray Data's settings without its own progress lines."""
    with warnings.catch_warnings():
        # Ray's own defaults set options that Ray has deprecated.
        warnings.filterwarnings(
            "ignore", message=r"`use_\w+` is deprecated", category=DeprecationWarning
        )
        context = ray.data.DataContext.get_current().copy()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    return context


def _tokenize_row(row: dict[str, Any], function: ShardFunction) -> dict[str, Any]:
    shard: Shard = pickle.loads(row["shard"])
    value: ShardResult | ShoalError
    try:
        value = function(shard)
    except ShoalError as error:
        value = error
    return {"outcome": pickle.dumps(_Outcome(number=shard.number, value=value))}
