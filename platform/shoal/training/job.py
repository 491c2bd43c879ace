"""What a run is given, and how it ended: values that travel between processes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from shoal.checkpoint import Location, RunFolder
from shoal.config import Config
from shoal.data import DatasetSpec, Sampler
from shoal.plan import Batches, Precision, at_size, topology_of

PATIENCE = 10
"""How many times ``cluster.timeout_s`` a rank waits for another's disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainJob:
    """What every rank of a run is given; all of it travels between processes."""

    config: Config
    """The configuration, its paths absolute, with as many workers as there are."""

    given: Config
    """The same with as many workers as the user asked for; the run's folder keeps this one."""

    data: DatasetSpec
    """The tokenized data."""

    precision: Precision
    """Formats, decided once for all ranks."""

    device: str
    """``cpu`` or ``cuda``."""

    @property
    def folder(self) -> RunFolder:
        """The run's folder, on storage that every rank sees."""
        return run_folder(self.config)

    @property
    def patience_s(self) -> float:
        """How long ranks wait for each other's disks while saving and loading; a peer that is gone
        is noticed at once all the same."""
        return PATIENCE * self.config.cluster.timeout_s

    def at_size(self, workers: int) -> TrainJob:
        """The same job for another number of workers."""
        return replace(self, config=at_size(self.given, workers))

    def sampler(self) -> Sampler:
        """The order of the data from its start; raises ConfigError where it fills no batch."""
        config = self.config
        return Sampler(
            self.data.num_sequences,
            Batches.of(config, topology_of(config)).global_batch,
            seed=config.run.seed,
            shuffle=config.data.shuffle,
            epochs=config.data.epochs,
            fingerprint=self.data.fingerprint,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """How a run ended."""

    step: int
    """Steps made, those before a resumption included."""

    num_steps: int
    """Steps asked for."""

    checkpoint: Location | None
    """The run's newest complete checkpoint."""

    is_cut: bool = False
    """Whether it was told to end before the last step; it goes on from ``checkpoint``."""

    @property
    def is_out_of_data(self) -> bool:
        """Whether the data ended before the last step."""
        return self.step < self.num_steps and not self.is_cut


def run_folder(config: Config) -> RunFolder:
    """The folder of the run that a configuration describes."""
    return RunFolder(Path(config.run.dir) / config.run.name, config.checkpoint.storage)
