"""Drives one run from its configuration to its end: ``shoal train``.

lock the folder ─ Ray ─ plan, refusals ─ tokenize ─ attempts ─ how it ended
                                                      │
                          the folder ◄── steps, events, checkpoints ──► console
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from shoal.checkpoint import newest
from shoal.config import Config
from shoal.data import DatasetSpec, load_tokenizer, prepare, tokenizer_name
from shoal.errors import ConfigError, EndedEarly, WorkError
from shoal.plan import (
    Machine,
    Plan,
    bytes_text,
    make_plan,
    plan_at,
    read_decoder_config,
    sizes_of,
)
from shoal.training import (
    EventKind,
    EventReader,
    TrainJob,
    TrainResult,
    check_resume,
    check_storage,
    run_folder,
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
from shoal_actors.train.attempt import Attempt
from shoal_actors.train.attempts import Attempts
from shoal_actors.train.checks import check_places, check_room
from shoal_actors.train.follow import Follower
from shoal_actors.train.gang import Gang
from shoal_actors.train.leaving import LeavingWatch
from shoal_actors.train.memory import memory_lack
from shoal_actors.train.note import note
from shoal_actors.train.paths import with_absolute_paths
from shoal_actors.train.room import Room
from shoal_actors.train.wish import Wish
from shoal_actors.train.worker import LOGS_FOLDER

TOKENS_FOLDER = ".tokens"
"""Cache of tokenized data in ``run.dir``; no run can have this name."""

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
    sizes_of(config)
    folder = run_folder(config)
    with folder.lock(), termination_raises(), _endings_noted(folder.path):
        check_storage(folder, config.checkpoint.resume)
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
    events = EventReader(folder)
    events.poll()
    try:
        yield
    except ConfigError as error:
        note(folder, EventKind.REFUSAL, message=str(error))
        raise
    except WorkError as error:
        note(folder, EventKind.END, error=str(error))
        raise
    except Terminated as told:
        note(folder, EventKind.END, stopped_by=told.signal_name)
        raise EndedEarly(f"Stopped by {told.signal_name}. {_way_on(events.poll())}") from None
    except EndedEarly as ending:
        note(folder, EventKind.END, stopped_by=str(ending))
        raise
    except KeyboardInterrupt:
        note(folder, EventKind.END, stopped_by="SIGINT")
        logger.info("Interrupted. %s", _way_on(events.poll()))
        raise


def _way_on(since_it_began: list[dict[str, Any]]) -> str:
    """What the command does when it is given again, by the events of this one."""
    places = [e for e in since_it_began if e["event"] in (EventKind.SAVE, EventKind.RESUME)]
    if not places:
        return "Nothing was saved since it began, and the same command begins there again."
    return f"The same command goes on from step {places[-1]['step']} ({places[-1]['path']})."


def _train(config: Config, console: Console) -> TrainResult:
    """Everything between the lock and the last word."""
    folder = run_folder(config)
    own = newest(folder.checkpoints)
    if own is not None and own.number >= config.train.steps:
        _say(
            console,
            f"Step {own.number} of {config.train.steps} is made already: {own.path}. Raise "
            "train.steps to go on, or choose another run.name to begin anew",
        )
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
        )
        sizes = _sizes(config, cluster, gang, console)
        check_places(
            replace(gang, num_workers=sizes[0]),
            cluster,
            field=_bound(config, sizes[0]),
            domain=config.cluster.nvlink_domain,
        )
        check_room(config, plan, folder)
        _warn(console, config, cluster)
        job = TrainJob(
            config=config,
            given=config,
            data=_tokenize(config),
            precision=plan.precision,
            device=plan.device,
        )
        job.sampler()  # refuses too little data
        follower = Follower(
            folder.path,
            console,
            num_steps=config.train.steps,
            max_failures=config.cluster.max_failures,
        )
        with follower, Wish(gang.resources) as wish:
            room = Room(
                sizes=sizes,
                worker=gang.resources,
                domain=config.cluster.nvlink_domain,
                look=cluster.now,
                ask=wish.ask,
                on_wait=partial(_note_wait, folder.path),
            )
            attempts = Attempts(
                config=config,
                folder=folder.path,
                attempt=Attempt(job=job, gang=gang),
                room=room,
                leaving=partial(
                    LeavingWatch, folder.path, own=cluster.own_node, ask=cluster.leaving
                ),
                introduce=lambda size: _introduce(
                    console, plan_at(config, size, cluster.machine), most=sizes[-1]
                ),
            )
            result = attempts.run()
    if not result.is_out_of_data:
        _say(console, f"Done: {result.checkpoint}")
    return result


def _sizes(config: Config, cluster: Cluster, gang: Gang, console: Console) -> tuple[int, ...]:
    """The numbers of workers that the run may have; what does not fit into memory is said."""
    sizes = []
    for size in (feasible := sizes_of(config).feasible):
        lack = memory_lack(plan_at(config, size, cluster.machine), cluster, gang.resources)
        if lack is None:
            sizes.append(size)
        else:
            _say(console, f"Note: {lack}")
    # One that was asked for alone is tried: what a plan counts is a little more than what is used.
    return tuple(sizes) or feasible[-1:]


def _bound(config: Config, size: int) -> str:
    """The key that a size comes from."""
    if size == config.cluster.workers:
        return "cluster.workers"
    return "cluster.workers_min" if size < config.cluster.workers else "cluster.workers_max"


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _warn(console: Console, config: Config, cluster: Cluster) -> None:
    """Say what may surprise."""
    lines = []
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
        _say(console, line)


def _introduce(console: Console, plan: Plan, *, most: int) -> None:
    """Say what is about to run."""
    size = plan.topology.world_size
    of = f"of at most {most} " if most > size else ""
    line = (
        f"{plan.name}: {plan.model_type} of {plan.num_parameters:,} parameters on "
        f"{size} {of}{plan.device} workers, computing in "
        f"{str(plan.precision.compute).removeprefix('torch.')} ({plan.precision.reason}), "
        f"{plan.batches.num_microbatches} x {plan.batches.micro_batch} sequences of each step on "
        f"each of {plan.topology.data} data-parallel ranks, {bytes_text(plan.fullest.peak)} of "
        "memory at the peak"
    )
    _say(console, line)


def _note_wait(folder: Path, missing: str) -> None:
    note(folder, EventKind.WAIT, missing=missing)


def _tokenize(config: Config) -> DatasetSpec:
    """Tokenize what is not in the cache yet."""
    return prepare(
        config.data,
        load_tokenizer(tokenizer_name(config.data.tokenizer, config.model.path)),
        Path(config.run.dir) / TOKENS_FOLDER,
        vocab_size=read_decoder_config(config.model).vocab_size,
        run_shards=RayDataRunner(workers=config.data.workers),
    )
