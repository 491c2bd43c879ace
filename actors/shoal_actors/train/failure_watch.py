"""What made an attempt fail, found while the workers that are well are still there to look at."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ray.train.v2._internal.exceptions import WorkerHealthCheckTimeoutError
from ray.train.v2._internal.execution.callback import WorkerGroupCallback

from shoal_actors.train.death import NODE_LOST, node_lost
from shoal_actors.train.failure import AttemptFailed, FailureReport, first_cause
from shoal_actors.train.hang import SILENT, Diagnosis
from shoal_actors.train.nodes import loss_of


class FailureWatch(WorkerGroupCallback):  # type: ignore[misc]
    """Ends an attempt at the first failure; lives in the controller's process."""

    def __init__(
        self, diagnosis: Diagnosis, loss_of: Callable[[str], str | None] = loss_of
    ) -> None:
        """``loss_of`` gives the reason why a node is gone, or None where it is there."""
        self._diagnosis = diagnosis
        self._loss_of = loss_of
        self._nodes: list[str] = []

    def after_worker_group_start(self, worker_group: Any) -> None:
        """Called when the workers have their ranks; notes each one's node."""
        self._nodes = [worker.metadata.node_id for worker in worker_group.get_workers()]

    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        """Called after each poll, before the workers of one that finds failures are killed.

        What it raises is what ``run_gang`` raises.
        """
        errors: Mapping[int, BaseException] = worker_group_status.errors
        if errors:
            cause = first_cause(errors)
            raise AttemptFailed(self._hang(errors, cause.report) or cause.report, cause.refusal)

    def _hang(
        self, errors: Mapping[int, BaseException], cause: FailureReport
    ) -> FailureReport | None:
        """The report on a rank that could not report itself, where one held the others up."""
        report = None
        silent = [r for r in sorted(errors) if isinstance(errors[r], WorkerHealthCheckTimeoutError)]
        if silent:
            report = self._diagnosis.silent(silent[0])
        elif cause.is_consequence:
            report = self._diagnosis.late(errors)
        if report is None or report.kind != SILENT or report.rank is None:
            return report
        reason = self._loss_of(self._nodes[report.rank])
        if reason is None:
            return report
        return replace(report, kind=NODE_LOST, message=f"{node_lost(reason)}; {report.message}")
