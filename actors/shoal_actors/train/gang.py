"""Runs one function on every worker of a gang, once, under Ray Train v2.

    driver ──fit()──► controller ──► worker 0 … n-1: function(job) inside a process group
                          │  polls twice a second
                          ├─ a rank failed ──► FailureWatch: who, and why ──► AttemptFailed
                          │                    all workers are killed
                          └─ all returned ──► rank 0's value

Ray's controller would try again by itself, at the same size and by counters of its own; what
follows a failure is the driver's to say instead (``attempts``). The checkpoints in the run's folder
say where an attempt goes on; Ray's own are not used, because a checkpoint that was reported counts
there only after the controller's next poll.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayError
from ray.train import (
    FailureConfig,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
    WorkerGroupError,
)
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import (
    PlacementGroupCleanerCallback,
)
from ray.train.v2._internal.constants import WORKER_HEALTH_CHECK_TIMEOUT_S_ENV_VAR
from ray.train.v2._internal.exceptions import (
    WorkerGroupStartupFailedError,
    WorkerGroupStartupTimeoutError,
)
from ray.util.placement_group import (
    PlacementGroup,
    PlacementGroupID,
    placement_group_table,
    remove_placement_group,
)

from shoal.errors import ShoalError, WorkError
from shoal_actors.driver import Terminated, termination_raises
from shoal_actors.train.failure import (
    AttemptFailed,
    controller_lost,
    first_cause,
    not_started,
)
from shoal_actors.train.failure_watch import FailureWatch
from shoal_actors.train.farewell import FarewellCallback
from shoal_actors.train.hang import Diagnosis

ABORT_TIMEOUT_S = 15.0
"""Time for the workers to be killed when the driver is told to stop."""

_LOOK_S = 0.2

Job = TypeVar("Job")
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gang:
    """The workers that a run asks for."""

    num_workers: int
    """Workers, one rank each."""

    device: str
    """``cpu`` or ``cuda``; one GPU each."""

    threads: int
    """CPUs that each worker occupies."""

    timeout_s: float
    """Seconds after which a collective gives a silent peer up."""

    silence_s: float
    """Seconds after which a worker whose process does not answer is killed."""

    @property
    def resources(self) -> dict[str, float]:
        """What Ray reserves for each worker."""
        resources = {"CPU": float(self.threads)}
        if self.device == "cuda":
            resources["GPU"] = 1.0
        return resources


class NoRoom(Exception):
    """The cluster gave no places to a gang, which it had room for just before."""


class _Trainer(TorchTrainer):  # type: ignore[misc]
    """Without two actors that serve nothing here.

    One outlives a killed controller to free its workers' places, which ``run_gang`` does here; and
    that actor looks up the cluster in a file that a killed ``ray start`` leaves behind, and then
    hangs for 12 seconds. The other hands out Ray datasets, and takes a core from the workers just
    as they start.
    """

    _controller: Any = None

    def _create_default_callbacks(self) -> list[Any]:
        callbacks = super()._create_default_callbacks()
        idle = (PlacementGroupCleanerCallback, DatasetsCallback)
        return [each for each in callbacks if not isinstance(each, idle)]

    def _register_sigint_handler(self, controller: Any) -> None:
        """Called in the main thread. Ray's own handler would end the process at a Ctrl-C."""
        self._controller = controller

    def await_end(self, timeout_s: float) -> None:
        """Wait until the workers of a ``fit`` that an exception has left are done, or failed."""
        deadline = time.monotonic() + timeout_s
        while self._controller is not None and (left_s := deadline - time.monotonic()) > 0:
            try:
                if ray.get(self._controller.get_state.remote(), timeout=left_s).is_terminal():
                    return
            except RayError:  # time is up, or the controller is gone
                return
            time.sleep(_LOOK_S)

    def abort(self) -> None:
        """Kill the workers of a ``fit`` that an exception has left."""
        if self._controller is None:
            return
        try:
            ray.get(self._controller.abort.remote(), timeout=ABORT_TIMEOUT_S)
        except RayError:
            pass  # the controller ends itself instead of answering


class _Backend(TorchConfig().backend_cls):  # type: ignore[misc]
    """Does not take the process group apart: workers do when they are done, and failed ones die.

    Ray would wait half a minute for a rank that hangs, and some seconds for a stopped process.
    """

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        """Called when the workers have returned, or an attempt has failed."""
        for worker in worker_group.get_workers():
            ray.kill(worker.actor)


class _Config(TorchConfig):  # type: ignore[misc]
    @property
    def backend_cls(self) -> type[_Backend]:
        return _Backend


def run_gang(
    function: Callable[[Job], Value],
    job: Job,
    gang: Gang,
    *,
    folder: Path,
    logs: Path,
    on_termination: Callable[[str], float],
) -> Value:
    """Call ``function(job)`` on each worker inside a default process group; rank 0's value.

    ``function`` reports its errors by ``RankFailed``. ``folder`` is on storage that all nodes
    share; Ray keeps its notes there. ``logs`` is where workers give their signs, if they do.
    ``on_termination`` is called at SIGTERM and SIGHUP, with the signal's name: it may tell the
    workers to end, and returns for how many seconds they are waited for.

    Raises AttemptFailed with the cause where a worker or their controller failed, NoRoom where the
    cluster has lost places, and WorkError where Ray itself fails. KeyboardInterrupt and Terminated
    pass through. However it ends, the workers have been killed.
    """
    trainer = _Trainer(
        lambda: function(job),
        scaling_config=ScalingConfig(
            num_workers=gang.num_workers,
            use_gpu=gang.device == "cuda",
            resources_per_worker=gang.resources,
        ),
        torch_config=_Config(
            backend="nccl" if gang.device == "cuda" else "gloo",
            timeout_s=gang.timeout_s,
        ),
        run_config=RunConfig(
            # A name that was used before would make Ray resume from its own notes.
            name=uuid.uuid4().hex[:12],
            storage_path=str(folder),
            failure_config=FailureConfig(max_failures=0, controller_failure_limit=0),
            callbacks=[
                FailureWatch(Diagnosis(folder=logs, num_ranks=gang.num_workers)),
                FarewellCallback(),
            ],
            worker_runtime_env={"env_vars": _worker_environment(gang)},
        ),
    )
    try:
        with _health_check(gang.silence_s):
            value: Value = _fit(trainer, on_termination).return_value
    except TrainingFailedError as error:
        raise _ending(error) from None
    except (RayActorError, OutOfMemoryError) as error:
        _free_places()
        raise AttemptFailed(controller_lost(error)) from error
    except RayError as error:
        raise WorkError(f"The run's Ray cluster was lost: {error}") from error
    return value


def _fit(trainer: _Trainer, on_termination: Callable[[str], float]) -> Any:
    """Fit, and kill the workers where this process is told to end."""
    try:
        with termination_raises():
            return trainer.fit()
    except Terminated as told:
        try:
            trainer.await_end(on_termination(told.signal_name))
        finally:  # also when told a second time
            trainer.abort()
        raise
    except KeyboardInterrupt:
        trainer.abort()
        raise


def _free_places() -> None:
    """Give up the places of a lost controller's workers, who died with it.

    Ray keeps them until the whole job ends. They are this job's only ones, whose number ends the
    name of each.
    """
    job = ray.get_runtime_context().get_job_id()
    for name in placement_group_table():
        if name.endswith(job):
            remove_placement_group(PlacementGroup(PlacementGroupID.from_hex(name)))


@contextmanager
def _health_check(timeout_s: float) -> Iterator[None]:
    """Set how long Ray's controller, which starts meanwhile, waits for a worker's answer."""
    name = WORKER_HEALTH_CHECK_TIMEOUT_S_ENV_VAR
    before = os.environ.get(name)
    os.environ[name] = str(timeout_s)
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def _worker_environment(gang: Gang) -> dict[str, str]:
    environment = {"OMP_NUM_THREADS": str(gang.threads), "MKL_NUM_THREADS": str(gang.threads)}
    if gang.device == "cuda":
        environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS is deterministic only then
    return environment


def _ending(error: TrainingFailedError) -> Exception:
    """What ended the run, in our words."""
    if isinstance(error, WorkerGroupError):
        cause = first_cause(error.worker_failures)
        return AttemptFailed(cause.report, cause.refusal)
    inner = getattr(error, "controller_failure", error)
    if isinstance(inner, ShoalError):
        return inner
    if isinstance(inner, WorkerGroupStartupTimeoutError):
        return NoRoom(str(inner))
    if isinstance(inner, WorkerGroupStartupFailedError):
        return AttemptFailed(not_started(inner))
    return WorkError(f"Ray Train failed. {type(inner).__name__}: {inner}")
