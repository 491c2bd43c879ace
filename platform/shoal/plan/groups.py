"""The decoder's units as groups, each with its layout; nothing is allocated."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator
from typing import Literal

import torch

from shoal.config import ShardingSettings
from shoal.fsdp import GlobalLayout, placements_for
from shoal.models import EMBEDDING, DecoderConfig, Part, decoder_units, parameter_shapes
from shoal.ops.mxfp8 import BLOCK
from shoal.plan.group import Formats, Group, Layers
from shoal.topology import Topology

_Held = Literal["own", "copies", "quantized"]
"""What sets a group apart from the others of its unit."""


def decoder_groups(
    config: DecoderConfig,
    part: Part,
    sharding: ShardingSettings,
    topology: Topology,
    formats: Formats,
    hidden: Collection[str] = (),
    *,
    quantized: Collection[str] = (),
    recompute: bool = False,
) -> tuple[Group, ...]:
    """One group for each unit of a part, in the order of forward: outer ones first.

    A table that the first part stands for is a group of its own, and so are a unit's parameters
    among those ``quantized``, which travel in MXFP8. ``hidden`` names what Muon orthogonalizes.
    """
    sizes: dict[Layers, tuple[int, int]] = {
        "dense": (topology.outer, topology.inner),
        "expert": (topology.expert_outer, topology.expert_inner),
    }
    degrees: dict[Layers, int] = {"dense": 1, "expert": topology.expert}
    levels = {"dense": sharding.dense, "expert": sharding.expert}
    kinds: dict[str, Layers] = {
        unit.path: "expert" if unit.expert else "dense" for unit in decoder_units(config, part)
    }
    owned = _owned_shapes(config, part, sorted(kinds, key=_place), quantized)
    return tuple(
        Group(
            unit=unit,
            layers=kinds[unit],
            layout=GlobalLayout.build(
                [_part(shape, degrees[kinds[unit]]) for shape in shapes.values()],
                math.prod(sizes[kinds[unit]]),
                block_rows=BLOCK if kind == "quantized" else 1,
            ),
            placements=placements_for(levels[kinds[unit]].outer, levels[kinds[unit]].inner),
            sizes=sizes[kinds[unit]],
            formats=formats,
            hidden=frozenset(i for i, name in enumerate(shapes) if name in hidden),
            is_copy=kind == "copies",
            is_quantized=kind == "quantized",
            is_recomputed=recompute and bool(unit),
        )
        for unit, kind, shapes in owned
    )


def _owned_shapes(
    config: DecoderConfig, part: Part, units: list[str], quantized: Collection[str]
) -> Iterator[tuple[str, _Held, dict[str, torch.Size]]]:
    """Each unit with the shapes of what it owns: what is beneath it and beneath no inner unit."""
    owned: dict[str, dict[str, torch.Size]] = {unit: {} for unit in units}
    for name, shape in parameter_shapes(config, part).items():
        owner = name
        while owner not in owned:
            owner = owner.rpartition(".")[0]
        owned[owner][name] = shape
    for unit, shapes in owned.items():
        if not part.is_first and EMBEDDING in shapes:
            yield unit, "copies", {EMBEDDING: shapes.pop(EMBEDDING)}
        apart = {name: shapes.pop(name) for name in list(shapes) if name in quantized}
        if apart:
            yield unit, "quantized", apart
        if shapes:
            yield unit, "own", shapes


def _part(shape: torch.Size, degree: int) -> torch.Size:
    """What one of ``degree`` ranks that share a layer's experts keeps of such a matrix."""
    return torch.Size([shape[0] // degree, *shape[1:]])


def _place(unit: str) -> list[tuple[int, str]]:
    """Key that sorts the root first, layers by their number, and inner units after theirs."""
    parts = re.findall(r"[^.]+", unit)
    return [(int(part), "") if part.isdigit() else (0, part) for part in parts]
