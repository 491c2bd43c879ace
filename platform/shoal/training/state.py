"""All that the steps of a run depend on: where it comes from, and where it is saved.

Weights, moments, the sampler's place, each rank's random generator and the losses that the guard
remembers. Whatever else a step needs follows from the configuration and its number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from shoal.checkpoint import (
    BackgroundSaver,
    DirectSaver,
    Loaded,
    Location,
    OnFailure,
    Saver,
    SaveReport,
    State,
    capture_rng,
    clean,
    hf_attachments,
    load,
    newest,
    restore_rng,
)
from shoal.config import Config
from shoal.data import Sampler, tokenizer_name
from shoal.models import DecoderStage
from shoal.training.build import fill_model
from shoal.training.events import EventKind, append_event
from shoal.training.guard import Guard
from shoal.training.job import TrainJob
from shoal.training.process import seed_rank
from shoal.training.start import starting_point


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """One attempt's state on one rank."""

    job: TrainJob
    rank: int
    patient: dist.ProcessGroup
    """All ranks, for all that waits for a disk: saving, loading, and looking for what is there."""
    model: DecoderStage
    optimizer: torch.optim.Optimizer
    sampler: Sampler
    guard: Guard
    attachments: Mapping[str, bytes]
    """What travels in every checkpoint, on rank 0: read once, so that all steps have the same."""

    def choose(self) -> Location | None:
        """The checkpoint to start from, as rank 0 sees it: others may not see the newest yet."""
        choice: list[Location | None] = [None]
        if self.rank == 0:
            folder = self.job.folder.checkpoints
            clean(folder)  # before: what an earlier attempt still writes is not published after
            choice[0] = starting_point(folder, self.job.config.checkpoint.resume)
        dist.broadcast_object_list(choice, src=0, group=self.patient)
        return choice[0]

    def begin(self, start: Location | None) -> int:
        """Fill model, optimizer, sampler and generators; the steps made before."""
        seed = self.job.config.run.seed
        if start is None:
            fill_model(self.model, self.job.config)
            seed_rank(seed, self.rank, 0)
            return 0
        loaded = self.load(start)
        self.note(EventKind.RESUME, step=loaded.step, path=str(start))
        return loaded.step

    def load(self, start: Location) -> Loaded:
        """Fill everything from a checkpoint."""
        allow = self.job.config.checkpoint.allow
        if allow:
            fill_model(self.model, self.job.config)  # what may be missing needs values
        loaded = load(
            start, model=self.model, optimizer=self.optimizer, allow=allow, group=self.patient
        )
        self.guard.losses = loaded.counters.get("losses", [])
        self.sampler.load_state_dict(loaded.counters["sampler"])
        if loaded.rng is not None:
            restore_rng(loaded.rng)
        else:
            # Another number of ranks saved: none of their generators is this rank's.
            seed_rank(self.job.config.run.seed, self.rank, loaded.step)
        return loaded

    def newest(self) -> Location | None:
        """The newest checkpoint of this run, as rank 0 sees it."""
        choice: list[Location | None] = [None]
        if self.rank == 0 and (last := newest(self.job.folder.checkpoints)) is not None:
            choice[0] = last.path
        dist.broadcast_object_list(choice, src=0, group=self.patient)
        return choice[0]

    def saver(self) -> Saver:
        """What saves this run's steps."""
        settings = self.job.config.checkpoint
        folder, on_failure = self.job.folder.checkpoints, OnFailure(settings.on_failure)
        if not settings.asynchronous:
            return DirectSaver(
                folder,
                keep=settings.keep,
                on_failure=on_failure,
                note=self._note_save,
                group=self.patient,
            )
        return BackgroundSaver(
            folder,
            keep=settings.keep,
            on_failure=on_failure,
            note=self._note_save,
            patience_s=self.job.patience_s,
            group=self.patient,
        )

    def save(self, saver: Saver, step: int) -> None:
        """Save a step, or begin to; every rank calls it."""
        state = State(
            model=self.model,
            optimizer=self.optimizer,
            counters=self._counters(step),
            rng=capture_rng(),
            attachments=self.attachments,
        )
        saver.save(step, state)

    def _counters(self, step: int) -> dict[str, object]:
        counters: dict[str, object] = {"step": step, "sampler": self.sampler.state_dict()}
        if losses := self.guard.losses:
            counters["losses"] = losses
        return counters

    def _note_save(self, report: SaveReport) -> None:
        fields: dict[str, object] = {
            "step": report.step,
            "num_bytes": report.num_bytes,
            "seconds": round(report.seconds, 3),
            "stall_seconds": round(report.stall_s, 4),
            "waited_seconds": round(report.waited_s, 4),
        }
        if report.error is None:
            self.note(EventKind.SAVE, **fields, path=str(report.path))
        else:
            fields |= {"error": report.error, "is_tried_again": report.is_tried_again}
            self.note(EventKind.SAVE_FAILED, **fields)

    def note(self, kind: EventKind, **fields: object) -> None:
        """Append an event to the run's, on rank 0."""
        if self.rank == 0:
            append_event(self.job.folder.path, kind, **fields)


def attachments_of(config: Config, model: DecoderStage) -> dict[str, bytes]:
    """What an export needs beside weights: the model's config and the tokenizer's files.

    Raises WorkError where one of them cannot be read.
    """
    attachments: dict[str, bytes] = {}
    tokenizer = tokenizer_name(config.data.tokenizer, config.model.path)
    for folder in (config.model.path, None if tokenizer == "bytes" else tokenizer):
        attachments |= hf_attachments(model.config.hf, None if folder is None else Path(folder))
    return attachments
