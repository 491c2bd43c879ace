"""Where each parameter of the decoder lies in a Hugging Face file, and the other way round.

Most parameters are one tensor of the same name. The routed experts of a layer, two matrices here,
are found in three ways, of which the first two are one layout in two vocabularies:

    separate      model.layers.0.mlp.experts.3.gate_proj.weight            (Qwen, OLMoE)
                  model.layers.0.block_sparse_moe.experts.3.w1.weight      (Mixtral)
    fused         model.layers.0.mlp.experts.gate_up_proj   [E, 2I, H]     (transformers 5)
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum

import torch

from shoal.models.config import DecoderConfig
from shoal.models.decoder import Decoder
from shoal.models.part import Part

_EXPERTS = re.compile(r"(model\.layers\.\d+)\.mlp\.experts\.(gate_up_proj|down_proj)")
EXPERT_BIAS = ".mlp.gate.e_score_correction_bias"
"""How the names of biases that choose experts end; they are fp32 everywhere."""

_ROUTER = re.compile(r"(model\.layers\.\d+)\.mlp\.gate\.weight")


class ExpertLayout(Enum):
    """How a file holds routed experts."""

    SEPARATE = "separate"
    """A tensor for each matrix of each expert; every program that reads these families knows it."""
    FUSED = "fused"
    """Two tensors a layer, ``[E, 2I, H]`` and ``[E, H, I]``, as ``transformers`` 5 computes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Consecutive rows of one parameter that are one tensor of a file."""

    name: str
    """The tensor's name in the file."""
    shape: tuple[int, ...]
    """Its shape there; a third dimension in front is the expert."""
    row_start: int
    """First row of the parameter that it holds."""
    num_rows: int
    """Rows of the parameter that it holds."""


def parameter_shapes(config: DecoderConfig, part: Part | None = None) -> dict[str, torch.Size]:
    """Shape of every parameter by its canonical name; a tied head is not listed.

    Of a part, those that it holds.
    """
    with torch.device("meta"):
        decoder = Decoder(config, torch.float32, part=part)
    return {name: parameter.shape for name, parameter in decoder.named_parameters()}


def tensor_shapes(config: DecoderConfig) -> dict[str, torch.Size]:
    """Shape of everything that a file of the decoder holds: parameters, then experts' biases."""
    with torch.device("meta"):
        decoder = Decoder(config, torch.float32)
    biases = {name: buffer.shape for name, buffer in decoder.named_buffers()}
    return parameter_shapes(config) | biases


def pieces_of(name: str, config: DecoderConfig, layout: ExpertLayout) -> tuple[Piece, ...] | None:
    """The file tensors that make up an expert matrix or a router, or None for any other name."""
    native_mixtral = config.model_type == "mixtral" and layout is ExpertLayout.SEPARATE
    router = _ROUTER.fullmatch(name)
    if router and native_mixtral and config.experts is not None:
        gate = (config.experts.num_experts, config.hidden_size)
        return (_whole(f"{router[1]}.block_sparse_moe.gate.weight", gate),)
    experts = _EXPERTS.fullmatch(name)
    if experts is None or config.experts is None:
        return None
    num, width, hidden = (
        config.experts.num_experts,
        config.experts.intermediate_size,
        config.hidden_size,
    )
    up = experts[2] == "gate_up_proj"
    if layout is ExpertLayout.FUSED:
        shape = (num, 2 * width, hidden) if up else (num, hidden, width)
        return (Piece(name=name, shape=shape, row_start=0, num_rows=num * shape[1]),)
    if native_mixtral:
        prefix, words = f"{experts[1]}.block_sparse_moe.experts", ("w1", "w3") if up else ("w2",)
    else:
        prefix = f"{experts[1]}.mlp.experts"
        words = ("gate_proj", "up_proj") if up else ("down_proj",)
    rows, columns = (width, hidden) if up else (hidden, width)
    return tuple(
        Piece(
            name=f"{prefix}.{expert}.{word}.weight",
            shape=(rows, columns),
            row_start=(expert * len(words) + place) * rows,
            num_rows=rows,
        )
        for expert in range(num)
        for place, word in enumerate(words)
    )


def _whole(name: str, shape: tuple[int, ...]) -> Piece:
    return Piece(name=name, shape=shape, row_start=0, num_rows=shape[0])


def file_layout(
    config: DecoderConfig, shapes: Mapping[str, torch.Size], layout: ExpertLayout
) -> dict[str, tuple[Piece, ...]]:
    """For each parameter in ``shapes``, its tensors in a file of this layout, in row order."""
    return {
        name: pieces_of(name, config, layout) or (_whole(name, tuple(shape)),)
        for name, shape in shapes.items()
    }


def found_layout(names: Collection[str]) -> ExpertLayout:
    """The layout of a file with tensors of these names; separate where it holds no experts."""
    fused = any(name.endswith(".mlp.experts.gate_up_proj") for name in names)
    return ExpertLayout.FUSED if fused else ExpertLayout.SEPARATE
