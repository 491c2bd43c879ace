"""Filling a decoder from wherever its weights come from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from shoal.errors import ConfigError
from shoal.fsdp import ShardedParameter, is_sharded, sharded_parameters, sync_weights
from shoal.models.decoder import Decoder
from shoal.models.names import tensor_shapes
from shoal.models.stage import DecoderStage
from shoal.models.weight_source import WeightSource

_CHUNK_BYTES = 16 * 2**20
_NAMES_SHOWN = 3


def load_weights(model: Decoder | DecoderStage, source: WeightSource) -> None:
    """Fill a plain or a sharded decoder; of a sharded one only the rows held here are read.

    Also of a part the source is the whole decoder's. Raises ``ConfigError`` that names what the
    source lacks, has too much of or has in another shape, before anything is filled.
    """
    sharded = is_sharded(model)
    parameters = sharded_parameters(model) if sharded else tuple(_plain_parameters(model))
    _check(tensor_shapes(model.config), source.shapes())
    with torch.no_grad():
        for parameter in parameters:
            _fill(parameter.name, parameter.local, parameter.row_start, source)
        for name, buffer in model.named_buffers():
            _fill(name, buffer, 0, source)
    if sharded:
        sync_weights(model)


def _plain_parameters(model: nn.Module) -> Iterator[ShardedParameter]:
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ValueError(f"{name} has no storage yet: shard the model or use to_empty first")
        yield ShardedParameter(
            names=(name,), shape=parameter.shape, row_start=0, local=parameter, primary=True
        )


def _check(wanted: Mapping[str, torch.Size], offered: Mapping[str, torch.Size]) -> None:
    missing = [name for name in wanted if name not in offered]
    if missing:
        raise ConfigError("weights", _some(missing), "these tensors are missing", _remedy(missing))
    unexpected = [name for name in offered if name not in wanted]
    if unexpected:
        raise ConfigError(
            "weights",
            _some(unexpected),
            "the model has no such parameters",
            "Take the config that belongs to these weights",
        )
    for name, shape in wanted.items():
        if offered[name] != shape:
            raise ConfigError(
                "weights",
                name,
                f"its shape is {tuple(offered[name])}, the config asks for {tuple(shape)}",
                "Take the config that belongs to these weights",
            )


def _some(names: list[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _remedy(missing: list[str]) -> str:
    if missing == ["lm_head.weight"]:
        return "Set tie_word_embeddings to true if the head is the embedding table"
    return "Take a complete folder of weights and the config that belongs to it"


def _fill(name: str, local: torch.Tensor, first: int, source: WeightSource) -> None:
    num_rows = local.shape[0]
    if num_rows == 0:
        return
    row_bytes = 4 * max(local.numel() // num_rows, 1)
    step = max(_CHUNK_BYTES // row_bytes, 1)
    for start in range(0, num_rows, step):
        stop = min(start + step, num_rows)
        local[start:stop].copy_(source.rows(name, first + start, first + stop))
