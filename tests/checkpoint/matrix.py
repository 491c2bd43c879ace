"""Twelve layouts of one model, what their ranks save, and what they find when they load.

Every layout has weights of its own seed and trains before it saves, so no two checkpoints are
alike. What its ranks held is written beside its checkpoint by way of their memory, not by way of
the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shoal.checkpoint import Loaded, capture_rng, load, save
from shoal.config import Config
from shoal.data import Batch, Sampler
from shoal.fsdp import sharded_parameters
from shoal.plan import resolve_precision, topology_of
from shoal.training import (
    StepMetrics,
    Stepper,
    build_model,
    build_sharded_optimizer,
    fill_model,
)
from tests.parallel.matrix import LEVELS, MODELS, sequences
from tests.training.tiny import make_config, part_of

MODEL = {**MODELS["mixture"], "num_hidden_layers": 5, "mlp_only_layers": [0, 3]}
"""Tied, with and without experts, and stages of unequal numbers of layers."""

LENGTH, NUM_SEQUENCES, STEP = 17, 12, 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """One of the twelve."""

    ranks: int
    domain: int | None = None
    pipeline: int = 1
    virtual: int = 1
    context: int = 1
    expert: int = 1
    dense: str = "PP"
    """Levels, outer then inner, by their first letters."""
    experts: str = "PP"


LAYOUTS: dict[str, Layout] = {
    "alone": Layout(ranks=1),
    "DP2": Layout(ranks=2, dense="RR", experts="RR"),
    "ZeRO-1 on 2": Layout(ranks=2, dense="OO", experts="OO"),
    "ZeRO-3 on 3": Layout(ranks=3),
    "HSDP": Layout(ranks=4, domain=2, dense="RP", experts="RP"),
    "HFSDP": Layout(ranks=4, domain=2, dense="OP", experts="OP"),
    "EP2": Layout(ranks=2, expert=2, dense="OO", experts="RR"),
    "EP4": Layout(ranks=4, expert=4, dense="PP", experts="OO"),
    "PP2": Layout(ranks=2, pipeline=2),
    "CP2": Layout(ranks=2, context=2, dense="GG", experts="PP"),
    "PP2 EP2": Layout(ranks=4, domain=2, pipeline=2, virtual=2, expert=2, dense="GG", experts="OO"),
    "CP2 EP2 HFSDP": Layout(ranks=4, domain=2, context=2, expert=2, dense="OP", experts="RP"),
}

State = dict[str, torch.Tensor]
Whole = dict[str, State]
"""By parameter: ``weight`` and every state of the optimizer, whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """What one rank held when it saved, and the step that it made next."""

    held: list[tuple[str, int, State]]
    """Parameter, first row, and the rows of its weight and of its moments."""
    rng: torch.Tensor
    ids: list[int]
    """The next sequences that its sampler gives."""
    metrics: StepMetrics


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What one rank found after it loaded, and the step that it made next."""

    rows: list[tuple[str, int, int]]
    """Parameter, first row, and row past the last; their bits were those that had been held."""
    rng: torch.Tensor | None
    ids: list[int]
    metrics: StepMetrics


def config_of(folder: Path, name: str, **precision: str) -> Config:
    """A run at a layout."""
    layout = LAYOUTS[name]
    return make_config(
        folder,
        run={"seed": list(LAYOUTS).index(name)},
        model={"config": MODEL},
        cluster={"workers": layout.ranks, "device": "cpu", "nvlink_domain": layout.domain},
        parallel={
            "pipeline": layout.pipeline,
            "virtual_stages": layout.virtual,
            "context": layout.context,
            "expert": layout.expert,
        },
        sharding={
            kind: {"outer": LEVELS[pair[0]], "inner": LEVELS[pair[1]]}
            for kind, pair in (("dense", layout.dense), ("expert", layout.experts))
        },
        precision={"compute": "fp32", **precision},
        train={"steps": 9, "global_batch": NUM_SEQUENCES},
    )


def save_each(folder: Path, configs: dict[str, Config]) -> dict[str, Saved]:
    """Train each layout for two steps, save it, and make another step."""
    return {name: _Run(config).save(folder / name) for name, config in configs.items()}


def load_each(folder: Path, config: Config, sources: list[str]) -> dict[str, Found]:
    """Load what each of the others saved into one and the same model, and make another step."""
    run = _Run(config)
    return {name: run.load(folder / name) for name in sources}


def path_of(folder: Path, name: str) -> Path:
    """A layout's checkpoint."""
    return folder / name / f"step-{STEP:08d}"


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors are equal to the bit."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    first, second = (each.reshape(-1).view(torch.uint8) for each in (left, right))
    return torch.equal(first, second)


class _Run:
    """One layout on this rank."""

    def __init__(self, config: Config) -> None:
        self._config = config
        topology, precision = topology_of(config), resolve_precision(config)
        passes = build_model(config, precision, torch.device("cpu"))
        self._model = passes.model
        self._optimizer = build_sharded_optimizer(config, passes.model, precision)
        self._stepper = Stepper(
            passes,
            self._optimizer,
            settings=config.optimizer,
            num_steps=config.train.steps,
            readers=topology.pipeline * topology.context,
        )
        self._share = NUM_SEQUENCES // topology.data
        self._first = topology.coordinates(dist.get_rank()).data * self._share

    def save(self, folder: Path) -> Saved:
        fill_model(self._model, self._config)
        sampler = _sampler(self._config.run.seed)
        for step in range(STEP):
            self._step(step)
            next(sampler)
        torch.manual_seed(1000 * self._config.run.seed + dist.get_rank())
        rng = capture_rng()
        save(
            folder,
            STEP,
            model=self._model,
            optimizer=self._optimizer,
            counters={"step": STEP, "sampler": sampler.state_dict()},
            rng=rng,
        )
        held = [(name, start, _copied(state)) for name, start, state in self._held()]
        return Saved(
            held=held, rng=rng["cpu"], ids=next(sampler).tolist(), metrics=self._step(STEP)
        )

    def load(self, folder: Path) -> Found:
        self._spoil()
        loaded = load(folder / f"step-{STEP:08d}", model=self._model, optimizer=self._optimizer)
        whole: Whole = torch.load(folder / "whole.pt", weights_only=True)
        found = list(self._check(whole))
        return Found(
            rows=found,
            rng=None if loaded.rng is None else loaded.rng["cpu"],
            ids=_next_ids(loaded),
            metrics=self._step(STEP),
        )

    def _check(self, whole: Whole) -> Iterator[tuple[str, int, int]]:
        """Compare what is held with what was held, bit by bit."""
        for name, start, state in self._held():
            stop = start + len(state["weight"])
            assert state.keys() == whole[name].keys(), name
            for key, value in state.items():
                expected = whole[name][key]
                expected = expected[start:stop] if expected.ndim else expected
                assert same_bits(value, expected), (name, key, start, stop)
            yield name, start, stop

    def _held(self) -> Iterator[tuple[str, int, State]]:
        for parameter in sharded_parameters(self._model):
            if parameter.local.numel():
                moments = self._optimizer.state[parameter.local]
                yield (
                    parameter.name,
                    parameter.row_start,
                    {"weight": parameter.local.detach(), **moments},
                )

    def _spoil(self) -> None:
        """Leave nothing of what an earlier load brought."""
        with torch.no_grad():
            for parameter in sharded_parameters(self._model):
                for value in [parameter.local, *self._optimizer.state[parameter.local].values()]:
                    value.fill_(torch.nan if value.is_floating_point() else 99)

    def _step(self, step: int) -> StepMetrics:
        return self._stepper.step(step, self._microbatches(step))

    def _microbatches(self, step: int) -> Iterator[Batch]:
        batch = sequences("mixture", LENGTH, NUM_SEQUENCES, step)
        size = self._share if self._share % 2 else self._share // 2
        for start in range(self._first, self._first + self._share, size):
            yield part_of(batch, start, start + size)


def _sampler(seed: int) -> Sampler:
    return Sampler(101, NUM_SEQUENCES, seed=seed, fingerprint="")


def _next_ids(loaded: Loaded) -> list[int]:
    assert loaded.step == loaded.counters["step"] == STEP
    counters: dict[str, Any] = loaded.counters
    sampler = _sampler(counters["sampler"]["seed"])
    sampler.load_state_dict(counters["sampler"])
    ids: list[int] = next(sampler).tolist()
    return ids


def _copied(state: State) -> State:
    return {key: value.clone() for key, value in state.items()}
