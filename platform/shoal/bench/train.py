"""Training steps of ours beside those of others, in one run and in turns.

Each rank is a process of one thread. A round times every contender once, so that what else the
machine does in a round meets all of them; a ratio is taken within a round and the median over all.
"""

from __future__ import annotations

import math
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from shoal.bench.contenders import Contender, Step, alone, ddp, fsdp2, ours
from shoal.bench.ranks import run_ranks, small_decoder
from shoal.bench.report import BenchCase, BenchReport
from shoal.config import Level
from shoal.errors import ConfigError
from shoal.models import DecoderConfig, parameter_shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSetup:
    """What is trained, and how often."""

    hidden_size: int = 512
    num_layers: int = 8
    vocab_size: int = 4096
    """Together 30M parameters with the defaults."""

    shapes: tuple[tuple[int, int], ...] = ((4, 256), (1, 128))
    """Sequences a rank and tokens a sequence; with few tokens communication weighs more."""

    ranks: int = 2

    rounds: int = 9
    """Timed; one more goes before to warm up."""

    @property
    def decoder(self) -> DecoderConfig:
        """The dense decoder that every contender trains."""
        return small_decoder(
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            vocab_size=self.vocab_size,
            context=max(length for _, length in self.shapes),
        )


def bench_train(*, against: str = "fsdp2", setup: BenchSetup | None = None) -> BenchReport:
    """Time our adapter beside ``"fsdp2"`` or ``"ddp"``; takes a minute or two.

    Raises ConfigError for another name and WorkError if a rank fails.
    """
    setup = setup or BenchSetup()
    pairs = _pairs(against)
    with tempfile.TemporaryDirectory() as folder:
        times: list[dict[str, list[float]]] = run_ranks(
            _time, setup, against, folder=Path(folder), ranks=setup.ranks
        )
    cases = [
        BenchCase(
            ours=first.name,
            theirs=second.name,
            sequences=sequences,
            tokens=tokens,
            ranks=setup.ranks,
            our_steps_s=tuple(steps[first.name]),
            their_steps_s=tuple(steps[second.name]),
            alone_steps_s=tuple(steps[alone().name]),
        )
        for (sequences, tokens), steps in zip(setup.shapes, times, strict=True)
        for first, second in pairs
    ]
    millions = sum(math.prod(shape) for shape in parameter_shapes(setup.decoder).values()) / 1e6
    model = (
        f"dense decoder of {millions:.1f}M parameters, {setup.ranks} ranks of one thread, bf16 "
        f"compute, fp32 reduction and main weights, fused AdamW, median of {setup.rounds} rounds"
    )
    return BenchReport(model=model, cases=tuple(cases))


def _pairs(against: str) -> list[tuple[Contender, Contender]]:
    """Who is compared with whom."""
    if against == "ddp":
        return [(ours("replicate", Level.REPLICATE), ddp())]
    if against == "fsdp2":
        zero3, zero1 = ours("ZeRO-3", Level.PARAMETERS), ours("ZeRO-1", Level.OPTIMIZER)
        resharding = fsdp2("ZeRO-3", reshard_after_forward=None)
        keeping = fsdp2("ZeRO-2", reshard_after_forward=False)
        return [(zero3, resharding), (zero1, resharding), (zero1, keeping)]
    raise ConfigError("against", against, "nothing is known by that name", "Use fsdp2 or ddp")


def _time(setup: BenchSetup, against: str) -> list[dict[str, list[float]]]:
    """Time every contender on one of the ranks: steps by name, for each shape."""
    contenders = {one.name: one for pair in _pairs(against) for one in (*pair, alone())}
    steps = {name: contender.build(setup.decoder) for name, contender in contenders.items()}
    return [_time_shape(steps, setup, *shape) for shape in setup.shapes]


def _time_shape(
    steps: dict[str, Step], setup: BenchSetup, sequences: int, length: int
) -> dict[str, list[float]]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = (sequences, length + 1)
    batch = torch.randint(setup.vocab_size, shape, generator=generator)
    tokens, labels = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
    names = list(steps)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(setup.rounds + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            dist.barrier()
            start = time.perf_counter()
            steps[name](tokens, labels)
            dist.barrier()
            if turn > 0:
                times[name].append(time.perf_counter() - start)
    return times
