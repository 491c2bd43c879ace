"""The loop that every rank of a run goes through, from its start or resumption to its end.

    build ─ fill or load ─┬─► read sequences ─ step ─ report ─┬─► save ─ drain ─► end
                          └────────────── again ◄─────────────┘
                                    (saving every few steps)

Everything a step depends on is in the checkpoint or follows from the configuration: weights,
moments, the sampler's place, each rank's random generator, the number of the step. So a run that is
cut anywhere and resumed takes the same steps, bit for bit, as one that is not. That goes for steps
that the guard refuses too: the data alone decides which, and where the loop goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from shoal.checkpoint import CONFIG_FILE, Saver, newest
from shoal.config import dump_config
from shoal.data import Batch, SequenceDataset, rank_share
from shoal.plan import Batches, topology_of
from shoal.storage import medium_of
from shoal.training.build import build_model, build_sharded_optimizer
from shoal.training.events import EventKind
from shoal.training.guard import Guard, Recovery, SpoiledStep
from shoal.training.job import TrainJob, TrainResult
from shoal.training.lines import writing
from shoal.training.memory import check_memory
from shoal.training.metrics import MetricsWriter, StepMetrics
from shoal.training.process import device_of, kernel_settings
from shoal.training.state import RunState, attachments_of
from shoal.training.step import Stepper


def _ignore(metrics: StepMetrics) -> None:
    """What is called after a step that nobody waits for."""


def _never() -> bool:
    return False


def train(
    job: TrainJob,
    on_step: Callable[[StepMetrics], None] = _ignore,
    is_told: Callable[[], bool] = _never,
) -> TrainResult:
    """Train on this rank, inside the default process group; every rank calls it alike.

    ``on_step`` is called after each step, on every rank with its own times. ``is_told`` is asked
    before each step: once it is true on any rank, all of them make that step, save it and end, and
    the result ``is_cut``. Raises WorkError where the loss is not finite, a checkpoint or the disk
    fails or a peer is lost, and ConfigError where a checkpoint does not fit the configuration or
    the memory of a host does not do.
    """
    config = job.config
    with kernel_settings(
        threads=config.cluster.threads_per_worker, deterministic=config.train.deterministic
    ):
        check_memory(job)
        return _Run.build(job).train(on_step, is_told)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """One attempt on one rank."""

    job: TrainJob
    rank: int
    place: tuple[int, int]
    """Which part of each step's sequences is this rank's, and of how many."""
    batches: Batches
    dataset: SequenceDataset
    state: RunState
    stepper: Stepper

    @classmethod
    def build(cls, job: TrainJob) -> _Run:
        """Open the data and make the model, without values; every rank calls it."""
        config, rank = job.config, dist.get_rank()
        topology = topology_of(config)
        batches = Batches.of(config, topology)
        passes = build_model(config, job.precision, device_of(job.device))
        optimizer = build_sharded_optimizer(config, passes.model, job.precision)
        guard = Guard(config.train.guard)
        return cls(
            job=job,
            rank=rank,
            place=(topology.coordinates(rank).data, topology.data),
            batches=batches,
            dataset=SequenceDataset(job.data),
            state=RunState(
                job=job,
                rank=rank,
                patient=dist.new_group(backend="gloo", timeout=timedelta(seconds=job.patience_s)),
                model=passes.model,
                optimizer=optimizer,
                sampler=job.sampler(),
                guard=guard,
                attachments=attachments_of(config, passes.model) if rank == 0 else {},
            ),
            stepper=Stepper(
                passes,
                optimizer,
                settings=config.optimizer,
                num_steps=config.train.steps,
                readers=topology.pipeline * topology.context,
                guard=guard,
            ),
        )

    def train(
        self, on_step: Callable[[StepMetrics], None], is_told: Callable[[], bool]
    ) -> TrainResult:
        """Start, step until the steps or the data end or any rank is told to; save on the way and
        at the end."""
        start = self.state.choose()
        step = self.state.begin(start)
        if self.rank == 0:
            # Not before: a configuration that does not fit the run's checkpoint is refused by then.
            path = self.job.folder.path / CONFIG_FILE
            with writing(path):
                medium_of(path).put(path, dump_config(self.job.given).encode())
        is_own = start is not None and start.parent == self.job.folder.checkpoints
        saved = step if is_own else None
        every, settings = self.job.config.checkpoint.every, self.job.config.train
        with self._metrics(step) as metrics, self.state.saver() as saver:
            if not is_own and settings.guard.action == "rollback":
                self.state.save(saver, step)  # where to go back to before the first save
                saved = step
            recovery = Recovery(settings.guard)
            while step < settings.steps and (ids := self._next_ids()) is not None:
                try:
                    result = self.stepper.step(step, self._microbatches(ids), told=is_told())
                except SpoiledStep as spoiled:
                    step = self._recover(spoiled, recovery, saver, metrics)
                    continue
                step = result.step
                if metrics is not None:
                    metrics.write(result)
                on_step(result)
                if every is not None and step % every == 0:
                    self.state.save(saver, step)
                    saved = step
                saver.poll()
                if self.stepper.any_told:
                    break
            if saved != step:
                self.state.save(saver, step)
            saver.drain()
        return self._end(step)

    def _recover(
        self,
        spoiled: SpoiledStep,
        recovery: Recovery,
        saver: Saver,
        metrics: MetricsWriter | None,
    ) -> int:
        """Go on without the data that spoiled a step, or raise it; the steps made before."""
        step = spoiled.step - 1
        skipped = self.state.sampler.consumed
        match self.job.config.train.guard.action:
            case "stop":
                raise spoiled
            case "skip":
                skipped = self.batches.global_batch
                recovery.count(spoiled, step)
            case "rollback":
                saver.settle()  # so that what is newest depends on the steps alone
                point = self.state.newest()
                if point is None:
                    raise spoiled
                data = self.state.sampler.state_dict()
                loaded = self.state.load(point)
                step, skipped = loaded.step, skipped - self.state.sampler.consumed
                self.state.sampler.load_state_dict(data)
                recovery.count(spoiled, step)
                if metrics is not None:
                    metrics.rewind(step)
        self.state.note(
            EventKind.SPOILED,
            step=spoiled.step,
            cause=spoiled.cause,
            goes_on_from=step,
            num_skipped=skipped,
        )
        return step

    def _next_ids(self) -> list[int] | None:
        """This rank's sequences of the next step; None where the data ends."""
        ids = next(self.state.sampler, None)
        return None if ids is None else rank_share(ids, *self.place).tolist()

    def _microbatches(self, ids: list[int]) -> Iterator[Batch]:
        size = self.batches.micro_batch
        for start in range(0, len(ids), size):
            yield Batch.load(self.dataset, ids[start : start + size])

    def _metrics(self, step: int) -> AbstractContextManager[MetricsWriter | None]:
        """The writer on rank 0, which keeps the steps up to ``step``; None elsewhere."""
        if self.rank != 0:
            return nullcontext()
        return MetricsWriter(self.job.folder.path, last_step=step)

    def _end(self, step: int) -> TrainResult:
        last = newest(self.job.folder.checkpoints)
        result = TrainResult(
            step=step,
            num_steps=self.job.config.train.steps,
            checkpoint=None if last is None else last.path,
            is_cut=self.stepper.any_told and step < self.job.config.train.steps,
        )
        if not result.is_cut:
            self.state.note(EventKind.END, step=step, out_of_data=result.is_out_of_data)
        return result
