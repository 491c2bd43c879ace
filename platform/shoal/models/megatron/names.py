"""Where each row of a dense decoder lies in a Megatron Core GPT checkpoint.

A layer's tensors are stacked over the layers there, and some of ours are interleaved in one::

    decoder.layers.self_attention.linear_qkv.weight   [L, (heads + 2 groups) D, H]
        of each query group: its queries' rows, then its key's, then its value's
    decoder.layers.mlp.linear_fc1.weight              [L, 2 F, H]
        all gate rows, then all up rows

Names are those of saved tensors: the local and the Transformer Engine specification of a layer
share them, so the norms before attention and MLP are called after the matrix behind them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from shoal.models.config import DecoderConfig
from shoal.models.names import parameter_shapes
from shoal.models.stage import EMBEDDING

LAYERS = "decoder.layers."
TABLE = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"
PADDED = (TABLE, HEAD)
"""Tensors with a row for each entry of the vocabulary, and rows that fill it up."""

_WHOLE = {
    EMBEDDING: TABLE,
    "model.norm.weight": "decoder.final_layernorm.weight",
    "lm_head.weight": HEAD,
}
_OF_LAYER = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "self_attn.o_proj.weight": "self_attention.linear_proj.weight",
    "self_attn.o_proj.bias": "self_attention.linear_proj.bias",
    "self_attn.q_norm.weight": "self_attention.q_layernorm.weight",
    "self_attn.k_norm.weight": "self_attention.k_layernorm.weight",
    "post_attention_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "mlp.down_proj.weight": "mlp.linear_fc2.weight",
    "mlp.down_proj.bias": "mlp.linear_fc2.bias",
}
_QKV, _FC1 = "self_attention.linear_qkv", "mlp.linear_fc1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Consecutive rows of one of our parameters."""

    name: str
    row_start: int
    num_rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronTensor:
    """A tensor of one layer, or of the whole model."""

    key: str
    """Its name, which all layers share."""

    layer: int | None
    """Its place in the stack; None where there is no stack."""

    width: tuple[int, ...]
    """Its shape but for the rows."""

    runs: tuple[Run, ...]
    """What its rows are, in order."""

    @property
    def num_rows(self) -> int:
        """Rows of it, without those that fill a vocabulary up."""
        return sum(run.num_rows for run in self.runs)

    @property
    def key_of_layer(self) -> str:
        """The name where layers are not stacked."""
        return self.key.replace(LAYERS, f"{LAYERS}{self.layer}.")


def megatron_tensors(config: DecoderConfig) -> tuple[MegatronTensor, ...]:
    """Every tensor of a checkpoint of this decoder, which has no experts."""
    shapes = parameter_shapes(config)
    return tuple(
        tensor
        for layer in range(config.num_layers)
        for tensor in _tensors_of_layer(layer, config, shapes)
    ) + tuple(
        _tensor(key, None, (_whole(name, shapes),), shapes)
        for name, key in _WHOLE.items()
        if name in shapes
    )


def _tensors_of_layer(
    layer: int, config: DecoderConfig, shapes: Mapping[str, torch.Size]
) -> Iterator[MegatronTensor]:
    prefix = f"model.layers.{layer}."
    for name, key in _OF_LAYER.items():
        if prefix + name in shapes:
            yield _tensor(LAYERS + key, layer, (_whole(prefix + name, shapes),), shapes)
    for kind in ("weight", "bias"):
        projections = [f"{prefix}self_attn.{part}_proj.{kind}" for part in "qkv"]
        if projections[0] in shapes:
            runs = tuple(_by_group(projections, config))
            yield _tensor(f"{LAYERS}{_QKV}.{kind}", layer, runs, shapes)
        gated = [f"{prefix}mlp.{part}_proj.{kind}" for part in ("gate", "up")]
        if gated[0] in shapes:
            runs = tuple(_whole(name, shapes) for name in gated)
            yield _tensor(f"{LAYERS}{_FC1}.{kind}", layer, runs, shapes)


def _by_group(projections: list[str], config: DecoderConfig) -> Iterator[Run]:
    query, *others = projections
    queries = config.num_heads // config.num_key_value_heads * config.head_dim
    for group in range(config.num_key_value_heads):
        yield Run(name=query, row_start=group * queries, num_rows=queries)
        for name in others:
            yield Run(name=name, row_start=group * config.head_dim, num_rows=config.head_dim)


def _whole(name: str, shapes: Mapping[str, torch.Size]) -> Run:
    return Run(name=name, row_start=0, num_rows=shapes[name][0])


def _tensor(
    key: str, layer: int | None, runs: tuple[Run, ...], shapes: Mapping[str, torch.Size]
) -> MegatronTensor:
    return MegatronTensor(key=key, layer=layer, width=tuple(shapes[runs[0].name][1:]), runs=runs)
