"""How the sequences of a step are divided."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.config import Config
from shoal.errors import ConfigError
from shoal.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """Sequences of one optimizer step, and their way over ranks and microbatches."""

    global_batch: int
    """Sequences of a step over all ranks."""

    micro_batch: int
    """Sequences that one data-parallel rank computes at a time."""

    num_microbatches: int
    """Microbatches of a step on each data-parallel rank."""

    seq_len: int
    """Tokens of a sequence."""

    @property
    def tokens(self) -> int:
        """Tokens of a step over all ranks."""
        return self.global_batch * self.seq_len

    @staticmethod
    def of(config: Config, topology: Topology) -> Batches:
        """The division that ``train`` and ``data`` ask for; unset, one microbatch a rank.

        Raises:
            ConfigError: for a global batch that does not divide into microbatches.
        """
        train = config.train
        at_once = topology.data * train.micro_batch
        global_batch = train.global_batch or at_once
        if global_batch % at_once:
            below = global_batch // at_once * at_once
            near = " or ".join(str(size) for size in (below, below + at_once) if size)
            raise ConfigError(
                "train.global_batch",
                global_batch,
                f"it does not divide into microbatches of {train.micro_batch} on "
                f"{topology.data} data-parallel ranks",
                f"Use a multiple of {at_once}, such as {near}",
            )
        return Batches(
            global_batch=global_batch,
            micro_batch=train.micro_batch,
            num_microbatches=global_batch // at_once,
            seq_len=config.data.seq_len,
        )
