"""Which rank's error is the cause."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError

from shoal.errors import ConfigError, PeerLost, Unavailable, WorkError
from shoal_actors.train.failure import RankFailed, describe, first_cause, last_word

BROKEN = RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc] Connection closed")


def _raised(error: Exception, cause: Exception | None = None) -> RankFailed:
    try:
        raise error from cause
    except Exception as caught:
        return describe(3, caught)


@pytest.mark.parametrize(
    ("error", "cause", "is_consequence", "is_final"),
    [
        (RuntimeError("scripted"), None, False, False),
        (BROKEN, None, True, False),
        (PeerLost("a rank was lost"), None, True, False),
        (WorkError("cannot publish"), BROKEN, True, False),
        (WorkError("disk full"), OSError("no space"), False, True),
        (Unavailable("the store is silent"), OSError("timeout"), False, False),
        (ConfigError("a.b", 1, "too small", "Give 2"), None, False, True),
    ],
)
def test_kinds_of_failure(
    error: Exception, cause: Exception | None, is_consequence: bool, is_final: bool
) -> None:
    report = _raised(error, cause).report
    assert (report.rank, report.kind, report.message) == (3, type(error).__name__, str(error))
    assert (report.is_consequence, report.is_final) == (is_consequence, is_final)
    assert "test_failure.py" in report.traceback


def test_an_error_that_led_to_itself_has_an_end() -> None:
    """As of a thread's error that is raised in another thread, explained, and raised again."""
    first, second = OSError("no space"), WorkError("disk full")
    first.__context__, second.__cause__ = second, first
    assert describe(3, first).report.message == "no space"


def test_a_report_survives_pickling() -> None:
    failed = pickle.loads(pickle.dumps(_raised(ConfigError("a.b", 1, "too small", "Give 2"))))
    assert failed.report.kind == "ConfigError"
    assert str(failed.refusal) == "a.b = 1: too small. Give 2."


def test_the_cause_is_the_error_that_no_peer_explains() -> None:
    died = WorkerHealthCheckFailedError("A worker health check failed.", RuntimeError("killed"))
    assert (
        first_cause({0: _raised(BROKEN), 1: _raised(ValueError("x"))}).report.kind == "ValueError"
    )
    cause = first_cause({0: _raised(BROKEN), 1: died}).report
    assert (cause.rank, cause.kind, cause.traceback) == (1, "ProcessDied", "killed\n")
    assert first_cause({0: _raised(BROKEN)}).report.is_consequence


def test_the_first_failure_is_told_when_the_budget_is_spent() -> None:
    reports = [_raised(error).report for error in (ValueError("first"), BROKEN, BROKEN)]
    text = last_word(reports[-1], [report.as_record() for report in reports], 2, Path("logs"))
    assert text.startswith("Traceback")
    assert "The run failed 3 times without a new checkpoint (cluster.max_failures = 2)" in text
    assert "first so: Rank 3 failed. ValueError: first" in text


def test_a_final_failure_is_told_without_its_traceback() -> None:
    first, final = _raised(ValueError("first")).report, _raised(WorkError("disk full")).report
    text = last_word(final, [first.as_record(), final.as_record()], 2, Path("logs"))
    assert text == "Rank 3 failed. WorkError: disk full\nMore in logs."
