"""Saving and loading of ours beside torch's DCP and a plain write, in one run and in turns.

A small decoder is trained at ZeRO-3 on ranks of one thread each. DCP is given the same tensors in
its cheapest form: each rank's rows under names of its own, without anything to match or exchange.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from shoal.bench.checkpoint_report import CheckpointReport, Round
from shoal.bench.contenders import our_training, step_of
from shoal.bench.ranks import run_ranks, small_decoder
from shoal.checkpoint import BackgroundSaver, Manifest, SaveReport, State, load, step_name
from shoal.config import Level
from shoal.errors import ConfigError, WorkError
from shoal.fsdp import sharded_parameters, sync_weights
from shoal.models import DecoderConfig

_WRITE_BYTES = 16 * 2**20

_PATIENCE_S = 600.0
"""How long ranks wait for the disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointBenchSetup:
    """What is saved, and how often."""

    hidden_size: int = 768
    num_layers: int = 8
    vocab_size: int = 4096
    """Together 64M parameters with the defaults: 770 MB with moments."""

    sequences: int = 2
    length: int = 128
    """Tokens of a step on each rank."""

    loop_steps: int = 6
    """Steps of the loop that goes on while a save is under way."""

    ranks: int = 2

    rounds: int = 7
    """Timed; one more goes before to warm up."""

    @property
    def decoder(self) -> DecoderConfig:
        """The dense decoder whose state is saved."""
        return small_decoder(
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            vocab_size=self.vocab_size,
            context=self.length,
        )


def bench_checkpoint(
    *, folder: Path, against: str = "dcp", setup: CheckpointBenchSetup | None = None
) -> CheckpointReport:
    """Time saves and loads on the disk of ``folder`` beside ``"dcp"``; takes a minute or two.

    Raises ConfigError for another name and WorkError if a rank fails.
    """
    if against != "dcp":
        raise ConfigError("against", against, "nothing is known by that name", "Use dcp")
    setup = setup or CheckpointBenchSetup()
    with tempfile.TemporaryDirectory(dir=folder, prefix=".bench-checkpoint-") as place:
        found = run_ranks(_time, place, setup, folder=Path(place), ranks=setup.ranks)
    return CheckpointReport(
        num_bytes=found["num_bytes"],
        ranks=setup.ranks,
        rounds=tuple(Round(**times) for times in found["rounds"]),
    )


def _time(place: str, setup: CheckpointBenchSetup) -> dict[str, Any]:
    """Time everything on one of the ranks."""
    warnings.filterwarnings("ignore", module="torch.distributed.*")
    model, optimizer = our_training(setup.decoder, Level.PARAMETERS)
    reports: list[SaveReport] = []
    with BackgroundSaver(
        Path(place) / "ours", keep=1, note=reports.append, patience_s=_PATIENCE_S
    ) as saver:
        bench = _Bench(
            Path(place),
            setup,
            model=model,
            optimizer=optimizer,
            saver=saver,
            reports=reports,
        )
        rounds = [bench.round(turn) for turn in range(setup.rounds + 1)]
    return {"num_bytes": bench.num_bytes, "rounds": rounds[1:]}


class _Bench:
    """The measurements of one rank."""

    def __init__(
        self,
        place: Path,
        setup: CheckpointBenchSetup,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        saver: BackgroundSaver,
        reports: list[SaveReport],
    ) -> None:
        self.num_bytes = 0
        self._place = place
        self._setup = setup
        self._model = model
        self._optimizer = optimizer
        self._saver = saver
        self._reports = reports
        self._number = 0
        self._step = step_of(model, optimizer)
        batch = torch.randint(setup.vocab_size, (setup.sequences, setup.length + 1))
        self._batch = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
        self._train()

    def round(self, turn: int) -> dict[str, float]:
        """Every measurement once, in an order that turns with the rounds; seconds by name."""
        parts: list[Callable[[dict[str, float]], None]] = [
            self._loops,
            self._write,
            self._plain,
            self._dcp,
        ]
        times: dict[str, float] = {}
        for part in parts[turn % len(parts) :] + parts[: turn % len(parts)]:
            part(times)
        return times

    def _train(self) -> None:
        self._step(*self._batch)

    def _save(self) -> None:
        self._number += 1
        counters = {"step": self._number}
        state = State(model=self._model, optimizer=self._optimizer, counters=counters)
        self._saver.save(self._number, state)

    def _loops(self, times: dict[str, float]) -> None:
        """The loop without a save, and with one under way."""
        with _timed(times, "loop_s"):
            for _ in range(self._setup.loop_steps):
                self._train()
        with _timed(times, "loop_with_save_s"):
            self._save()
            for _ in range(self._setup.loop_steps):
                self._train()
        self._saver.drain()
        times["stall_s"] = self._reports[-1].stall_s if self._reports else 0.0

    def _write(self, times: dict[str, float]) -> None:
        """A save from its beginning until it is published, then a load of it."""
        with _timed(times, "write_s"):
            self._save()
            self._saver.drain()
        path = self._place / "ours" / step_name(self._number)
        self.num_bytes = Manifest.read(path).num_bytes
        self._await_deletion(path.parent)
        with _timed(times, "load_s"):
            load(path, model=self._model, optimizer=self._optimizer)

    def _await_deletion(self, folder: Path) -> None:
        """The step before is deleted beside what follows a save: a load is timed without that.

        Raises WorkError where it stays.
        """
        deadline = time.monotonic() + _PATIENCE_S
        while len(os.listdir(folder)) > 1:
            if time.monotonic() > deadline:
                raise WorkError(f"{folder}: an old step was not deleted in {_PATIENCE_S:g} s.")
            time.sleep(0.01)

    def _plain(self, times: dict[str, float]) -> None:
        """One process writes as many bytes to one file."""
        file = self._place / "plain"
        memory = memoryview(os.urandom(_WRITE_BYTES))
        with _timed(times, "plain_s"):
            if dist.get_rank() == 0:
                with file.open("wb", buffering=0) as stream:
                    for start in range(0, self.num_bytes, _WRITE_BYTES):
                        stream.write(memory[: self.num_bytes - start])
                    os.fsync(stream.fileno())
        if dist.get_rank() == 0:
            file.unlink(missing_ok=True)

    def _dcp(self, times: dict[str, float]) -> None:
        """A save of the same tensors by DCP, and a load of it."""
        path = self._place / "dcp"
        state = self._state()
        with _timed(times, "dcp_save_s"):
            state_dict_saver.save(state, checkpoint_id=path)
        with _timed(times, "dcp_load_s"):
            state_dict_loader.load(state, checkpoint_id=path)
        sync_weights(self._model)
        if dist.get_rank() == 0:
            shutil.rmtree(path)

    def _state(self) -> dict[str, Any]:
        """This rank's rows, under names that no other rank has."""
        rank = dist.get_rank()
        return {
            f"{parameter.name}.{name}.{rank}": value.detach()
            for parameter in sharded_parameters(self._model)
            for name, value in {
                "weight": parameter.local,
                **self._optimizer.state[parameter.local],
            }.items()
            if parameter.local.numel()
        }


@contextmanager
def _timed(times: dict[str, float], name: str) -> Iterator[None]:
    """Seconds that the block takes all ranks together."""
    dist.barrier()
    start = time.perf_counter()
    yield
    dist.barrier()
    times[name] = time.perf_counter() - start
