"""The same updates at several layouts: what every rank holds afterwards, put together."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import torch

from shoal.config import Config
from shoal.fsdp import ShardedParameter, sharded_parameters
from shoal.plan import resolve_precision
from shoal.training import build_model, build_sharded_optimizer, fill_model
from tests.ranks import RankPool
from tests.training.tiny import MIXTURE, make_config

Whole = dict[str, dict[str, torch.Tensor]]
"""By parameter: ``weight`` and every state of the optimizer, whole."""

Held = list[tuple[str, int, dict[str, torch.Tensor]]]
"""Parameter, first row, and the rows of the weight and of each state that a rank holds."""

_MODEL = {**MIXTURE, "mlp_only_layers": [1]}

LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {"cluster": {"workers": 1}},
    "two, ZeRO-3": {"cluster": {"workers": 2}},
    "two that share experts": {
        "cluster": {"workers": 2},
        "parallel": {"expert": 2},
        "sharding": {"dense": {"inner": "optimizer"}, "expert": {"inner": "replicate"}},
    },
    "two stages": {"cluster": {"workers": 2}, "parallel": {"pipeline": 2}},
    "two that share sequences": {"cluster": {"workers": 2}, "parallel": {"context": 2}},
    "two, DDP": {
        "cluster": {"workers": 2},
        "sharding": {"dense": {"inner": "replicate"}, "expert": {"inner": "replicate"}},
    },
    "four, HFSDP and HSDP": {
        "cluster": {"workers": 4, "nvlink_domain": 2},
        "parallel": {"expert": 2},
        "sharding": {
            "dense": {"outer": "optimizer", "inner": "parameters"},
            "expert": {"outer": "replicate", "inner": "gradients"},
        },
    },
    "four, stages of ZeRO-2": {
        "cluster": {"workers": 4},
        "parallel": {"pipeline": 2, "virtual_stages": 1},
        "sharding": {"dense": {"inner": "gradients"}, "expert": {"inner": "gradients"}},
    },
}
"""What differs from layout to layout."""


def layout_config(folder: Path, layout: str, **sections: dict[str, Any]) -> Config:
    """A mixture with a dense layer in it, at a layout."""
    base = LAYOUTS[layout]
    cluster = {"device": "cpu", **base["cluster"]}
    model = {"config": _MODEL}
    return make_config(folder, **{**base, "cluster": cluster, "model": model, **sections})


def gradient(parameter: ShardedParameter, update: int) -> torch.Tensor:
    """A gradient of the rows held here that is a function of the parameter and the update."""
    seed = zlib.crc32(parameter.name.encode()) + update
    whole = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
    return whole[parameter.row_start : parameter.row_stop]


def update(config: Config, updates: int) -> Held:
    """Make updates with given gradients on this rank; what it holds then."""
    precision = resolve_precision(config)
    passes = build_model(config, precision, torch.device("cpu"))
    fill_model(passes.model, config)
    optimizer = build_sharded_optimizer(config, passes.model, precision)
    parameters = sharded_parameters(passes.model)
    for number in range(updates):
        for parameter in parameters:
            parameter.local.grad = gradient(parameter, number)
        optimizer.step()
    return [
        (
            parameter.name,
            parameter.row_start,
            {
                "weight": parameter.local.detach().clone(),
                **optimizer.state.get(parameter.local, {}),
            },
        )
        for parameter in parameters
        if parameter.local.numel()
    ]


def update_each(configs: list[Config], updates: int) -> list[Held]:
    """``update`` of several configurations."""
    return [update(config, updates) for config in configs]


def whole_states(by_rank: list[Held]) -> Whole:
    """The rows of all ranks together; replicas must agree."""
    rows: dict[str, dict[str, dict[int, torch.Tensor]]] = {}
    for held in by_rank:
        for name, start, state in held:
            for key, value in state.items():
                known = rows.setdefault(name, {}).setdefault(key, {})
                place = start if value.ndim else 0
                assert torch.equal(known.setdefault(place, value), value), (name, key)
    return {
        name: {key: _joined(parts) for key, parts in state.items()} for name, state in rows.items()
    }


def _joined(parts: dict[int, torch.Tensor]) -> torch.Tensor:
    values = [parts[start] for start in sorted(parts)]
    return torch.cat(values) if values[0].ndim else values[0]


def at_every_layout(
    folder: Path, ranks: RankPool, updates: int, **sections: dict[str, Any]
) -> dict[str, Whole]:
    """What the updates make at each layout."""
    by_size: dict[int, list[str]] = {}
    for layout, values in LAYOUTS.items():
        by_size.setdefault(values["cluster"]["workers"], []).append(layout)
    found: dict[str, Whole] = {}
    for size, layouts in by_size.items():
        configs = [layout_config(folder, layout, **sections) for layout in layouts]
        by_rank = ranks.run(size, update_each, configs, updates)
        for index, layout in enumerate(layouts):
            found[layout] = whole_states([results[index] for results in by_rank])
    return found


def assert_same_bits(found: dict[str, Whole]) -> Whole:
    """Every layout has made what one rank made, which is returned."""
    expected = found["one rank"]
    for layout, states in found.items():
        assert states.keys() == expected.keys()
        for name, state in states.items():
            assert state.keys() == expected[name].keys()
            for key, value in state.items():
                assert torch.equal(value, expected[name][key]), (layout, name, key)
    return expected
