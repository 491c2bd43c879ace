"""Decoders with a few thousand random weights, biases and norms included, in folders."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from shoal.inference.forward.model import ServedModel
from shoal.inference.forward.rows import Rows
from shoal.inference.limits import Limits
from shoal.models import (
    DecoderConfig,
    parameter_shapes,
    tensor_shapes,
    whole_tensors,
    write_hf_folder,
)
from shoal.ops import fixed


class RandomWeights:
    """A ``WeightSource`` of random numbers; equal for equal shapes."""

    def __init__(self, shapes: Mapping[str, torch.Size]) -> None:
        self._shapes = shapes

    def shapes(self) -> Mapping[str, torch.Size]:
        return self._shapes

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(sum(name.encode()))
        shape = self._shapes[name]
        values = torch.randn(shape, generator=generator) * 0.2
        return (values + name.endswith("norm.weight"))[start:stop]


def random_model(hf: dict[str, Any], precision: fixed.Kind) -> ServedModel:
    config = DecoderConfig.from_hf(hf)
    return ServedModel(config, RandomWeights(parameter_shapes(config)), precision)


def random_folder(hf: dict[str, Any], out: Path) -> Path:
    """A folder with fp32 weights and no tokenizer, so that it speaks bytes."""
    config = DecoderConfig.from_hf(hf)
    write_hf_folder(out, config, whole_tensors(RandomWeights(tensor_shapes(config))))
    return out


def limits_for(model: ServedModel, **others: int) -> Limits:
    values: dict[str, Any] = {"num_blocks": 64, "block_size": 16, "max_running": 16} | others
    return Limits(
        vocab_size=model.config.vocab_size,
        context_length=model.config.max_position_embeddings,
        **values,
    )


def rows_of(sequences: list[list[int]], start: int = 0) -> Rows:
    """Tokens of sequences from position ``start`` on, 8 blocks of 16 tokens for each of them."""
    lengths = torch.tensor([len(tokens) for tokens in sequences])
    number = torch.arange(len(sequences)).repeat_interleave(lengths)
    first = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    positions = torch.arange(len(number)) - first + start
    return Rows(
        tokens=torch.tensor([token for tokens in sequences for token in tokens]),
        positions=positions.int(),
        sequences=number.int(),
        slots=number * 128 + positions,
        block_tables=torch.arange(8 * len(sequences)).view(-1, 8).int(),
    )
