"""The decoder's units as groups, each with its layout; nothing is allocated."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import torch

from shoal.config import ShardingSettings
from shoal.fsdp import GlobalLayout, placements_for
from shoal.models import (
    EMBEDDING,
    DecoderConfig,
    Part,
    decoder_units,
    matrix_rows,
    parameter_shapes,
)
from shoal.ops.mxfp8 import BLOCK
from shoal.plan.group import Formats, Group, Layers
from shoal.topology import Topology

LAYER = re.compile(r"model\.layers\.(\d+)\.")
"""Begins the name of a layer's parameter."""


def decoder_groups(
    config: DecoderConfig,
    part: Part,
    sharding: ShardingSettings,
    topology: Topology,
    formats: Formats,
    hidden: frozenset[str] = frozenset(),
    *,
    quantized: frozenset[str] = frozenset(),
    recompute: bool = False,
) -> tuple[Group, ...]:
    """One group for each unit of a part, in the order of forward: outer ones first.

    A table that the first part stands for is a group of its own, and so are a unit's parameters
    among those ``quantized``, which travel in MXFP8. ``hidden`` names what Muon orthogonalizes.
    """
    dense, expert = (topology.outer, topology.inner), (topology.expert_outer, topology.expert_inner)
    return _groups(
        config,
        part,
        sharding,
        dense,
        expert,
        topology.expert,
        formats,
        hidden,
        quantized,
        recompute,
    )


@lru_cache(maxsize=1024)
def _groups(
    config: DecoderConfig,
    part: Part,
    sharding: ShardingSettings,
    dense_sizes: tuple[int, int],
    expert_sizes: tuple[int, int],
    expert_degree: int,
    formats: Formats,
    hidden: frozenset[str],
    quantized: frozenset[str],
    recompute: bool,
) -> tuple[Group, ...]:
    sizes: dict[Layers, tuple[int, int]] = {"dense": dense_sizes, "expert": expert_sizes}
    degrees: dict[Layers, int] = {"dense": 1, "expert": expert_degree}
    placements = {
        "dense": placements_for(sharding.dense.outer, sharding.dense.inner),
        "expert": placements_for(sharding.expert.outer, sharding.expert.inner),
    }
    return tuple(
        Group(
            unit=unit.path,
            layers=unit.layers,
            names=tuple(unit.shapes),
            layout=_layout(
                tuple(unit.shapes.values()),
                degrees[unit.layers],
                math.prod(sizes[unit.layers]),
                BLOCK if unit.kind == "quantized" else 1,
            ),
            placements=placements[unit.layers],
            sizes=sizes[unit.layers],
            formats=formats,
            hidden=frozenset(i for i, name in enumerate(unit.shapes) if name in hidden),
            is_copy=unit.kind == "copies",
            is_quantized=unit.kind == "quantized",
            is_recomputed=recompute and bool(unit.path),
        )
        for whole in _units(config, part)
        for unit in whole.parted(quantized)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unit:
    """A unit with the shapes of what it owns: what is beneath it and beneath no inner unit."""

    path: str
    layers: Layers
    shapes: Mapping[str, torch.Size]
    kind: Literal["own", "copies", "quantized"] = "own"
    """What sets it apart from the rest of its module."""

    def parted(self, quantized: frozenset[str]) -> Iterator[_Unit]:
        """What of it is among those ``quantized``, and the rest."""
        apart = {name: shape for name, shape in self.shapes.items() if name in quantized}
        if not apart or self.kind == "copies":
            yield self
            return
        yield replace(self, shapes=apart, kind="quantized")
        rest = {name: shape for name, shape in self.shapes.items() if name not in quantized}
        if rest:
            yield replace(self, shapes=rest)


def _units(config: DecoderConfig, part: Part) -> Iterator[_Unit]:
    """A part's units, the root first, layers by their number, and inner units after theirs."""
    shapes, of_layers = whole_shapes(config), _layer_units(config)
    ends = [EMBEDDING] if part.is_first else []
    if part.is_last:
        ends += [name for name in shapes if name != EMBEDDING and LAYER.match(name) is None]
        if not part.is_first and config.tie_word_embeddings:
            table = {EMBEDDING: shapes[EMBEDDING]}
            yield _Unit(path="", layers="dense", shapes=table, kind="copies")
    if ends:
        yield _Unit(path="", layers="dense", shapes={name: shapes[name] for name in ends})
    for layer in part.layers:
        yield from of_layers[layer]


@lru_cache(maxsize=8)
def _layer_units(config: DecoderConfig) -> tuple[tuple[_Unit, ...], ...]:
    """The units of each layer, outer ones first."""
    owned: dict[int, dict[str, dict[str, torch.Size]]] = {}
    experts = {unit.path for unit in decoder_units(config) if unit.expert}
    for name, shape in whole_shapes(config).items():
        layer = LAYER.match(name)
        if layer is not None:
            path = layer[0].removesuffix(".")
            inner = next((unit for unit in _prefixes(name) if unit in experts), path)
            units = owned.setdefault(int(layer[1]), {path: {}})
            units.setdefault(inner, {})[name] = shape
    return tuple(
        tuple(
            _Unit(path=path, layers="expert" if path in experts else "dense", shapes=shapes)
            for path, shapes in owned[layer].items()
        )
        for layer in range(config.num_layers)
    )


def _prefixes(name: str) -> Iterator[str]:
    """The modules that a parameter lies beneath, inner ones first."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


@lru_cache(maxsize=8)
def whole_shapes(config: DecoderConfig) -> dict[str, torch.Size]:
    """Shape of every parameter by its name; what it returns is shared and stays as it is."""
    return parameter_shapes(config)


@lru_cache(maxsize=8)
def hidden_matrices(config: DecoderConfig) -> frozenset[str]:
    """Names of the parameters that Muon orthogonalizes."""
    return frozenset(matrix_rows(config))


@lru_cache(maxsize=4096)
def _layout(
    shapes: tuple[torch.Size, ...], degree: int, num_ranks: int, block_rows: int
) -> GlobalLayout:
    """One object for all groups that are alike.

    Of matrices that ``degree`` ranks share each keeps as many rows.
    """
    kept = [torch.Size([shape[0] // degree, *shape[1:]]) for shape in shapes]
    return GlobalLayout.build(kept, num_ranks, block_rows=block_rows)
