"""A step of a dense model reads no number on the host: what a captured iteration needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.config import Config
from shoal.data import Batch
from shoal.fsdp import sharded_parameters
from shoal.plan import resolve_precision
from shoal.training import (
    AdamW,
    Microbatch,
    Moments,
    Stepper,
    build_model,
    build_sharded_optimizer,
    fill_model,
    set_learning_rate,
    skipping,
)
from tests.ranks import RankPool
from tests.training.layouts import gradient
from tests.training.tiny import MIXTURE, MODEL, make_config

LENGTH = 19


class HostRead(AssertionError):
    """Something asked for a number of a tensor."""


READING_OPS = (
    "_local_scalar_dense",
    "item",
    "is_nonzero",
    "equal",
    "nonzero",
    "nonzero_numpy",
    "masked_select",
    "unique_dim",
    "_unique2",
    "unique_consecutive",
    "repeat_interleave",  # without its length given
)
READING_METHODS = (
    "item",
    "tolist",
    "numpy",
    "cpu",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "__array__",
    "__contains__",
    "__dlpack__",
)


class _Operators(TorchDispatchMode):
    """Sees every operator, also those of backward."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in READING_OPS:
            raise HostRead(f"aten.{name}")
        self.count += 1
        return func(*args, **(kwargs or {}))


class _Methods(TorchFunctionMode):
    """Sees what reads a CPU tensor without any operator, such as ``tolist``."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in READING_METHODS:
            raise HostRead(f"Tensor.{func.__name__}")
        return func(*args, **(kwargs or {}))


def _batch(step: int, number: int) -> Batch:
    draw = torch.Generator().manual_seed(100 * step + number)
    tokens = torch.randint(0, 257, (2, LENGTH + 1), generator=draw)
    documents = torch.zeros(2, LENGTH, dtype=torch.int64)
    documents[1, 7:] = 1
    return Batch(
        tokens=tokens[:, :-1],
        labels=tokens[:, 1:].clone(),
        positions=torch.arange(LENGTH).expand(2, -1),
        documents=documents,
    )


def _stepper(config: Config) -> tuple[Stepper, Any, torch.optim.Optimizer]:
    precision = resolve_precision(config)
    passes = build_model(config, precision, torch.device("cpu"))
    fill_model(passes.model, config)
    optimizer = build_sharded_optimizer(config, passes.model, precision)
    stepper = Stepper(
        passes,
        optimizer,
        settings=config.optimizer,
        num_steps=2,
        readers=config.parallel.context,
    )
    return stepper, passes.model, optimizer


def _walk(config: Config) -> tuple[int, str]:
    """Operators of a step after the first, and what it read on the host, if anything."""
    stepper, _, _ = _stepper(config)
    place = dist.get_rank() // config.parallel.context
    batches = [_batch(0, 2 * place), _batch(0, 2 * place + 1)]
    stepper.step(0, batches)
    prepared = [Microbatch.of(batch, torch.device("cpu")) for batch in batches]
    operators = _Operators()
    try:
        with _Methods(), operators:
            outcome = stepper.iterate(prepared)
    except HostRead as error:
        return operators.count, str(error)
    assert outcome.read().loss > 0
    return operators.count, ""


def _walk_each(configs: list[Config]) -> list[tuple[int, str]]:
    return [_walk(config) for config in configs]


LEVELS = ("replicate", "optimizer", "gradients", "parameters")
WHOLE_BLOCKS = {
    **MODEL,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "head_dim": 32,
}
FORMATS: list[dict[str, Any]] = [
    {},
    {"precision": {"compute": "bf16"}, "train": {"recompute": "layer"}},
    {"precision": {"compute": "bf16", "main_weights": "bf16", "rounding": "stochastic"}},
    {"precision": {"compute": "fp32", "moments": "8bit"}},
    {"precision": {"compute": "mxfp8", "parameter_gather": "bf16"}},
    {
        "precision": {"compute": "mxfp8"},
        "model": {"config": WHOLE_BLOCKS},
        "train": {"recompute": "layer"},
    },
    {"optimizer": {"kind": "muon", "clip": 1.0}},
    {"optimizer": {"kind": "sgd", "momentum": 0.9}},
    {"parallel": {"context": 2}},
]


def _settings(folder: Path, workers: int, level: str, sections: dict[str, Any]) -> Config:
    model = {"config": {**MODEL, "attention_dropout": 0.1 if "parallel" not in sections else 0.0}}
    base: dict[str, Any] = {
        "model": model,
        "cluster": {"workers": workers, "device": "cpu", "nvlink_domain": max(workers // 2, 1)},
        "sharding": {"dense": {"inner": level}},
        "optimizer": {"lr": 0.01, "clip": 1.0, "weight_decay": 0.1},
    }
    if "parallel" in sections:
        base["cluster"]["nvlink_domain"] = workers
    return make_config(folder, **{**base, **sections})


@pytest.mark.parametrize("workers", [1, 2])
def test_dense_steps_read_nothing(tmp_path: Path, ranks: RankPool, workers: int) -> None:
    cells: list[tuple[str, dict[str, Any]]] = [(level, {}) for level in LEVELS]
    cells += [("parameters", s) for s in FORMATS if workers > 1 or "parallel" not in s]
    configs = [_settings(tmp_path, workers, level, sections) for level, sections in cells]
    for results in ranks.run(workers, _walk_each, configs):
        for cell, (count, read) in zip(cells, results, strict=True):
            assert read == "", cell
            assert count > 300, cell


def test_the_mode_sees_what_mixtures_read(tmp_path: Path, ranks: RankPool) -> None:
    config = make_config(tmp_path, model={"config": MIXTURE})
    ((_, read),) = ranks.run(1, _walk, config)
    assert read


@pytest.mark.parametrize(
    "look",
    [
        lambda t: t.item(),
        lambda t: t.tolist(),
        lambda t: bool(t),
        lambda t: float(t),
        lambda t: t.nonzero(),
        lambda t: torch.equal(t, t),
        lambda t: t.numpy(),
    ],
)
def test_the_mode_sees_every_way_to_read(look: Any) -> None:
    with pytest.raises(HostRead), _Methods(), _Operators():
        look(torch.ones(()))


KINDS: list[dict[str, Any]] = [
    {},
    {"precision": {"compute": "fp32", "main_weights": "bf16", "rounding": "stochastic"}},
    {"precision": {"compute": "fp32", "moments": "8bit"}},
    {"optimizer": {"kind": "muon", "weight_decay": 0.1}},
    {"optimizer": {"kind": "sgd", "momentum": 0.9}},
]


def _spoiled(config: Config) -> None:
    """Skip a step of gradients that are no numbers, and make the next one as if it had not been."""
    states = []
    for spoiled in (False, True):
        _, model, optimizer = _stepper(config)
        parameters = sharded_parameters(model)
        for number in range(3):
            if spoiled:
                for parameter in parameters:
                    parameter.local.grad = torch.full(parameter.local.shape, torch.nan)
                with skipping(optimizer, torch.tensor(True)):
                    optimizer.step()
            for parameter in parameters:
                parameter.local.grad = gradient(parameter, number)
            with skipping(optimizer, torch.tensor(False)):
                optimizer.step()
        states.append(
            [(p.local.detach(), optimizer.state[p.local]) for p in parameters if p.local.numel()]
        )
    for (weight, state), (other_weight, other_state) in zip(*states, strict=True):
        assert torch.equal(weight, other_weight) and state.keys() == other_state.keys()
        for key, value in state.items():
            assert torch.equal(value, other_state[key]), key


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_skipped_steps_leave_no_trace(
    tmp_path: Path, ranks: RankPool, kind: dict[str, Any]
) -> None:
    config = make_config(tmp_path, **{"cluster": {"workers": 2, "device": "cpu"}, **kind})
    ranks.run(2, _spoiled, config)


def test_a_rate_in_a_tensor_makes_the_same_bits() -> None:
    weights = []
    for rate in (0.01, torch.tensor(0.01, dtype=torch.float64)):
        weight = nn.Parameter(torch.linspace(-1, 1, 40).view(2, 20))
        optimizer = AdamW(
            [weight],
            lr=rate,  # type: ignore[arg-type]
            betas=(0.9, 0.95),
            eps=1e-8,
            weight_decay=0.1,
            moments=Moments(torch.bfloat16),
        )
        for step in range(3):
            set_learning_rate(optimizer, 0.01 / (step + 1))
            weight.grad = weight.detach().cos()
            optimizer.step()
        assert optimizer.param_groups[0]["lr"] == 0.01 / 3
        weights.append(weight)
    assert torch.equal(*weights)
