"""Drives one run from its configuration to its end: ``shoal train``.

lock the folder ─ Ray ─ plan, refusals ─ tokenize ─ gang of workers ─ how it ended
                                                       │
                          the folder ◄── steps, events, checkpoints ──► console
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from rich.console import Console

from shoal.checkpoint import RunFolder, await_saves, newest
from shoal.config import Config
from shoal.data import DatasetSpec, load_tokenizer, prepare, tokenizer_name
from shoal.errors import ConfigError, EndedEarly, WorkError
from shoal.plan import Machine, Plan, make_plan, read_decoder_config
from shoal.training import (
    EventKind,
    EventReader,
    TrainJob,
    TrainResult,
    append_event,
    check_resume,
)
from shoal_actors.data import RayDataRunner
from shoal_actors.driver import (
    Cluster,
    Terminated,
    divert_output,
    is_elsewhere,
    open_cluster,
    termination_raises,
)
from shoal_actors.train.checks import check_places, check_room
from shoal_actors.train.failure import FailureReport, RunFailed, last_word
from shoal_actors.train.follow import Follower
from shoal_actors.train.gang import Gang, run_gang
from shoal_actors.train.hang import where
from shoal_actors.train.lookout import Lookout
from shoal_actors.train.paths import with_absolute_paths
from shoal_actors.train.pulse import Sign
from shoal_actors.train.worker import LOGS_FOLDER, work

TOKENS_FOLDER = ".tokens"
"""Cache of tokenized data in ``run.dir``; no run can have this name."""

DRAIN_TIMEOUT_S = 20.0
"""How long a run that is told to end waits for the saves under way: Kubernetes gives 30 seconds."""

logger = logging.getLogger(__name__)


def run(config: Config) -> int:
    """Train as ``config`` says and return 0.

    Goes on from the newest complete checkpoint of the run's folder. Raises ConfigError for what
    cannot work, before any worker starts where that can be known; WorkError with the first cause
    where the run failed; EndedEarly where the data ended or SIGTERM or SIGHUP came before the last
    step.
    """
    config = with_absolute_paths(config)
    if not is_elsewhere():
        make_plan(config, Machine.here())  # refuses before anything is started or written
    folder = _folder(config)
    with folder.lock(), termination_raises(), _endings_noted(folder.path):
        check_resume(folder.checkpoints, config.checkpoint.resume)
        logs = folder.path / LOGS_FOLDER
        logs.mkdir(exist_ok=True)
        with divert_output(logs / "driver.log") as console:
            result = _train(config, console)
    if result.is_out_of_data:
        raise EndedEarly(
            f"The data ended after step {result.step} of {result.num_steps}"
            f" (data.epochs = {config.data.epochs}); {result.checkpoint} holds that step."
        )
    return 0


@contextmanager
def _endings_noted(folder: Path) -> Iterator[None]:
    """Note how a run ended other than by itself, and let being told to end count as ended early."""
    try:
        yield
    except ConfigError as error:
        _note_ending(folder, EventKind.REFUSAL, message=str(error))
        raise
    except WorkError as error:
        _note_ending(folder, EventKind.END, error=str(error))
        raise
    except Terminated as told:
        _note_ending(folder, EventKind.END, stopped_by=told.signal_name)
        raise EndedEarly(
            f"Stopped by {told.signal_name}; the same command goes on from the last checkpoint."
        ) from None
    except KeyboardInterrupt:
        _note_ending(folder, EventKind.END, stopped_by="SIGINT")
        raise


def _note_ending(folder: Path, kind: EventKind, **fields: str) -> None:
    try:
        append_event(folder, kind, **fields)
    except WorkError as error:  # a full disk, say; how the run ended matters more
        logger.warning("%s", error)


def _folder(config: Config) -> RunFolder:
    return RunFolder(Path(config.run.dir) / config.run.name)


def _train(config: Config, console: Console) -> TrainResult:
    """Everything between the lock and the last word."""
    folder = _folder(config)
    own = newest(folder.checkpoints)
    if own is not None and own.number >= config.train.steps:
        console.print(f"Step {own.number} of {config.train.steps} is made already: {own.path}")
        return TrainResult(step=own.number, num_steps=config.train.steps, checkpoint=own.path)
    num_cpus = config.cluster.workers * config.cluster.threads_per_worker
    # A second time, because Ray's core has put a handler of its own in place, which aborts.
    with open_cluster(num_cpus=num_cpus) as cluster, termination_raises():
        plan = make_plan(config, cluster.machine)
        gang = Gang(
            num_workers=config.cluster.workers,
            device=plan.device,
            threads=config.cluster.threads_per_worker,
            timeout_s=config.cluster.timeout_s,
            silence_s=config.cluster.silence_s,
            max_failures=config.cluster.max_failures,
        )
        check_places(gang, cluster)
        check_room(config, plan, folder.path)
        _introduce(console, config, plan, cluster)
        job = TrainJob(
            config=config,
            data=_tokenize(config),
            precision=plan.precision,
            device=plan.device,
        )
        job.sampler()  # refuses too little data
        result = _supervise(job, gang, console)
    if not result.is_out_of_data:
        console.print(f"Done: {result.checkpoint}", markup=False, highlight=False, soft_wrap=True)
    return result


def _introduce(console: Console, config: Config, plan: Plan, cluster: Cluster) -> None:
    """Say what is about to run, and what may surprise."""
    lines = [
        f"{plan.name}: {plan.model_type} of {plan.num_parameters:,} parameters on "
        f"{config.cluster.workers} {plan.device} workers, computing in "
        f"{str(plan.precision.compute).removeprefix('torch.')} ({plan.precision.reason})"
    ]
    num_cpus = config.cluster.workers * config.cluster.threads_per_worker
    cores = len(os.sched_getaffinity(0))
    if cluster.is_own and num_cpus > cores:
        lines.append(f"Note: {num_cpus} threads of workers share the {cores} cores of this machine")
    if "runtime_resources" in Path(config.run.dir).parts:
        lines.append(
            f"Note: {config.run.dir} lies in the job's working directory, which Ray deletes some "
            "time after the job; set run.dir to a folder that stays"
        )
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _tokenize(config: Config) -> DatasetSpec:
    """Tokenize what is not in the cache yet."""
    return prepare(
        config.data,
        load_tokenizer(tokenizer_name(config.data.tokenizer, config.model.path)),
        Path(config.run.dir) / TOKENS_FOLDER,
        vocab_size=read_decoder_config(config.model).vocab_size,
        run_shards=RayDataRunner(workers=config.data.workers),
    )


def _supervise(job: TrainJob, gang: Gang, console: Console) -> TrainResult:
    """Run the gang under the user's eyes."""
    folder = job.folder.path
    events = EventReader(folder)
    events.poll()  # those of earlier commands
    follower = Follower(
        folder, console, num_steps=job.config.train.steps, max_failures=gang.max_failures
    )
    lookout = Lookout(
        folder / LOGS_FOLDER,
        num_ranks=gang.num_workers,
        patience_s=job.config.cluster.straggler_s,
        on_straggler=partial(_note_straggler, folder),
    )
    with follower, lookout:
        try:
            return run_gang(
                work,
                job,
                gang,
                folder=folder / LOGS_FOLDER / "ray",
                logs=folder / LOGS_FOLDER,
                on_failure=partial(_note_failure, folder),
                before_termination=partial(
                    await_saves, job.folder.checkpoints, timeout_s=DRAIN_TIMEOUT_S
                ),
            )
        except RunFailed as error:
            failures = [each for each in events.poll() if each["event"] == EventKind.FAILURE]
            raise WorkError(
                last_word(error.report, failures, gang.max_failures, folder / LOGS_FOLDER)
            ) from None


def _note_failure(folder: Path, report: FailureReport) -> None:
    append_event(folder, EventKind.FAILURE, **report.as_record())


def _note_straggler(folder: Path, sign: Sign, waited_s: float) -> None:
    try:
        append_event(
            folder,
            EventKind.STRAGGLER,
            rank=sign.rank,
            message=f"others have waited {waited_s:.0f} s for it; last seen {where(sign)}",
            stack=sign.stack,
        )
    except WorkError as error:  # a full disk, say; whoever looks on must not end the run
        logger.warning("%s", error)
