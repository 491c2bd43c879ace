"""How a decoder is sharded: its units as data, and the order of wrapping.

    unit                          mesh      gradients divided by
    model.layers.N.mlp.experts    expert    data-parallel size x expert-parallel size
    model.layers.N                dense     data-parallel size
    (the decoder itself)          dense     data-parallel size

The decoder itself owns embedding, final norm and head; a part of one, what it has of these. With
expert parallelism each rank keeps its part of the experts, and the expert mesh joins the ranks with
the same part. An expert sees the tokens of all ranks that share its set of experts, so the sum of
its gradients already covers them; dividing by their number too makes it the average over all ranks,
as everywhere else.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shoal.fsdp import (
    CommunicatorFactory,
    MixedPrecision,
    Placements,
    Schedule,
    Share,
    communicator_for,
    fully_shard,
    fully_shard_context,
)
from shoal.models.config import DecoderConfig
from shoal.models.decoder import Decoder
from shoal.models.experts import Experts, Router
from shoal.models.mxfp8 import check_quantized_gather
from shoal.models.part import Part
from shoal.parallel.expert import ExpertExchange
from shoal.topology import Meshes


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardedUnit:
    """One module that is gathered and let go as a whole."""

    path: str
    """Its name in the decoder; empty for the decoder itself."""
    expert: bool
    """Whether it lives on the expert mesh."""


def decoder_units(config: DecoderConfig, part: Part | None = None) -> tuple[ShardedUnit, ...]:
    """The units of a decoder, or of a part, in the order of wrapping: inner ones first."""
    units = []
    for layer in range(config.num_layers) if part is None else part.layers:
        if config.sparse_layers[layer]:
            units.append(ShardedUnit(path=f"model.layers.{layer}.mlp.experts", expert=True))
        units.append(ShardedUnit(path=f"model.layers.{layer}", expert=False))
    return (*units, ShardedUnit(path="", expert=False))


def shard_decoder(
    decoder: Decoder,
    meshes: Meshes,
    dense: Placements,
    expert: Placements,
    precision: MixedPrecision,
    device: torch.device | str,
    *,
    communicators: CommunicatorFactory = communicator_for,
    quantized_gather: bool = False,
) -> Schedule:
    """Shard a decoder in place; the result serves ``microbatch``.

    ``dense`` and ``expert`` place the units of the two meshes. A decoder on the meta device gets
    buffers without values on ``device``: fill them by ``initialize`` or ``load_weights``.
    ``communicators`` makes what collectives pass through. With ``quantized_gather`` matrices that
    multiply in MXFP8 travel in it too.

    Raises ``ConfigError`` for experts that do not divide among the ranks of ``meshes``, and for
    matrices that cannot travel in MXFP8.
    """
    share = _share_experts(decoder, meshes, torch.device(device), communicators)
    _place_biases(decoder, torch.device(device))
    quantized = []
    if quantized_gather:
        check_quantized_gather(decoder.config, decoder.mxfp8, is_asked_for=True)
        quantized = [decoder.get_parameter(name) for name in decoder.mxfp8]
    with fully_shard_context(device, communicators=communicators) as context:
        for unit in decoder_units(decoder.config, decoder.part):
            fully_shard(
                decoder.get_submodule(unit.path),
                meshes.expert if unit.expert else meshes.dense,
                expert if unit.expert else dense,
                precision=precision,
                grad_divisor=share.count if unit.expert else 1,
                share=share if unit.expert else None,
                copies=() if unit.path else decoder.copies,
                quantized=quantized,
                recomputed=decoder.recompute == "layer" and bool(unit.path),
            )
    return context


def _place_biases(decoder: Decoder, device: torch.device) -> None:
    """Give the biases that choose experts memory: every rank has all of them."""
    for module in decoder.modules():
        if isinstance(module, Router) and module.bias is not None:
            bias = module.bias
            placed = torch.zeros_like(bias, device=device) if bias.is_meta else bias.to(device)
            module.e_score_correction_bias = placed


def _share_experts(
    decoder: Decoder, meshes: Meshes, device: torch.device, communicators: CommunicatorFactory
) -> Share:
    """Leave this rank its part of every layer's experts; which part that is."""
    config, group = decoder.config.experts, meshes.expert_group
    if config is None:
        return Share()
    communicator = None if group is None else communicators(group, device)
    exchange = ExpertExchange(config.num_experts, communicator)
    for module in decoder.modules():
        if isinstance(module, Experts):
            module.keep_part(exchange)
    return Share(index=exchange.rank, count=exchange.size)
