"""Which rows of which parameters each rank of a run holds, known without starting one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from shoal.config import Config
from shoal.fsdp import Shard, ShardedParameter, Share
from shoal.models import split_decoder, tensor_shapes
from shoal.plan.facts import stages_of
from shoal.plan.group import Formats, Group
from shoal.plan.groups import decoder_groups, whole_shapes
from shoal.plan.model import read_decoder_config
from shoal.plan.mxfp8 import mxfp8_parameters
from shoal.plan.refusals import check_layout
from shoal.topology import Coordinates

_FORMATS = Formats(
    main_weights=torch.float32,
    compute=torch.float32,
    gradients=torch.float32,
    reduce=torch.float32,
)
"""Where rows lie depends on none of them."""


def held_by_rank(config: Config) -> tuple[tuple[ShardedParameter, ...], ...]:
    """What ``sharded_parameters`` will give on each rank, in fp32 on the meta device.

    Raises ``ConfigError`` for degrees that fit neither each other nor the model.
    """
    decoder, topology = check_layout(config)
    stages = stages_of(config)
    parts = split_decoder(decoder, stages.num_chunks)
    travels = config.precision.parameter_gather != "bf16"
    quantized = mxfp8_parameters(config, decoder) if travels else frozenset[str]()
    groups = [
        decoder_groups(decoder, part, config.sharding, topology, _FORMATS, quantized=quantized)
        for part in parts
    ]
    ranks = (topology.coordinates(rank) for rank in range(topology.world_size))
    return tuple(
        tuple(
            parameter
            for chunk in stages.chunks_of(at.pipeline)
            for parameter in _in_order(whole_shapes(decoder), groups[chunk], at, topology.expert)
        )
        for at in ranks
    )


def buffers_of(config: Config) -> dict[str, torch.Size]:
    """Shape of each buffer that a run's model is saved with, by name."""
    decoder = read_decoder_config(config.model)
    parameters = whole_shapes(decoder)
    return {name: size for name, size in tensor_shapes(decoder).items() if name not in parameters}


def _in_order(
    order: Iterable[str], groups: Sequence[Group], at: Coordinates, num_shares: int
) -> list[ShardedParameter]:
    """Rows of one part's parameters, in the model's own order."""
    held = {p.name: p for group in groups for p in rows_of(group, at, num_shares, torch.float32)}
    return [held[name] for name in order if name in held]


def rows_of(
    group: Group, at: Coordinates, num_shares: int, main_weights: torch.dtype
) -> Iterator[ShardedParameter]:
    """Rows of one group's parameters on the rank at ``at``, without memory.

    ``num_shares`` is the number of ranks that share experts.
    """
    place = place_of(group, at)
    share = Share()
    if group.layers == "expert":
        share = Share(index=at.expert, count=num_shares)
    sharded = [isinstance(kind, Shard) for kind in group.placements.optimizer]
    run = group.layout.run(sharded, group.sizes, place)
    replica, num_replicas = group.replica(place)
    for index, name in enumerate(group.names):
        part, rows = group.layout.shapes[index], group.layout.rows(index, *run)
        local = torch.empty(rows.stop - rows.start, *part[1:], dtype=main_weights, device="meta")
        yield ShardedParameter(
            names=(name,),
            shape=share.whole(part),
            row_start=share.first_row(part) + rows.start,
            local=nn.Parameter(local),
            primary=not group.is_copy and replica == 0,
            replica=replica,
            num_replicas=1 if group.is_copy else num_replicas,
        )


def place_of(group: Group, at: Coordinates) -> tuple[int, int]:
    """Where the rank at ``at`` stands on the axes by which a group is sharded."""
    return (at.outer, at.inner) if group.layers == "dense" else (at.expert_outer, at.expert_inner)
