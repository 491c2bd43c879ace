"""The decoder's units as groups, each with its layout; nothing is allocated."""

from __future__ import annotations

import math
import re

import torch

from shoal.config import ShardingSettings
from shoal.fsdp import GlobalLayout, placements_for
from shoal.models import DecoderConfig, decoder_units, parameter_shapes
from shoal.plan.group import Formats, Group, Layers
from shoal.topology import Topology


def decoder_groups(
    config: DecoderConfig, sharding: ShardingSettings, topology: Topology, formats: Formats
) -> tuple[Group, ...]:
    """One group for each unit of the decoder, in the order of forward: outer ones first."""
    sizes: dict[Layers, tuple[int, int]] = {
        "dense": (topology.outer, topology.inner),
        "expert": (topology.expert_outer, topology.expert_inner),
    }
    levels = {"dense": sharding.dense, "expert": sharding.expert}
    kinds: dict[str, Layers] = {
        unit.path: "expert" if unit.expert else "dense" for unit in decoder_units(config)
    }
    shapes = _owned_shapes(config, list(kinds))
    for unit, kind in kinds.items():
        if kind == "expert":
            shapes[unit] = [_part(shape, topology.expert) for shape in shapes[unit]]
    return tuple(
        Group(
            unit=unit,
            layers=kinds[unit],
            layout=GlobalLayout.build(shapes[unit], math.prod(sizes[kinds[unit]])),
            placements=placements_for(levels[kinds[unit]].outer, levels[kinds[unit]].inner),
            sizes=sizes[kinds[unit]],
            formats=formats,
        )
        for unit in sorted(kinds, key=_place)
    )


def _owned_shapes(config: DecoderConfig, units: list[str]) -> dict[str, list[torch.Size]]:
    """Shapes of the parameters that each unit owns: those beneath it and no inner unit."""
    shapes: dict[str, list[torch.Size]] = {unit: [] for unit in units}
    for name, shape in parameter_shapes(config).items():
        owner = name
        while owner not in shapes:
            owner = owner.rpartition(".")[0]
        shapes[owner].append(shape)
    return shapes


def _part(shape: torch.Size, degree: int) -> torch.Size:
    """What one of ``degree`` ranks that share a layer's experts keeps of such a matrix."""
    return torch.Size([shape[0] // degree, *shape[1:]])


def _place(unit: str) -> list[tuple[int, str]]:
    """Key that sorts the root first, layers by their number, and inner units after theirs."""
    parts = re.findall(r"[^.]+", unit)
    return [(int(part), "") if part.isdigit() else (0, part) for part in parts]
