"""One layer of the decoder."""

from __future__ import annotations

import torch
from torch import nn

from shoal import ops
from shoal.models.attention import Attention
from shoal.models.config import DecoderConfig
from shoal.models.experts import SparseMLP
from shoal.models.mlp import MLP
from shoal.models.norm import RMSNorm


class DecoderLayer(nn.Module):
    """Attention and MLP, each on normalized input and added to it."""

    def __init__(self, config: DecoderConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.self_attn = Attention(config, layer, dtype)
        self.mlp: MLP | SparseMLP
        if config.sparse_layers[layer]:
            assert config.experts is not None
            self.mlp = SparseMLP(hidden, config.experts, dtype)
        else:
            self.mlp = MLP(hidden, config.intermediate_size, dtype, bias=config.mlp_bias)
        self.input_layernorm = RMSNorm(hidden, config.rms_norm_eps, dtype)
        self.post_attention_layernorm = RMSNorm(hidden, config.rms_norm_eps, dtype)

    def forward(
        self,
        hidden: torch.Tensor,
        cosine: torch.Tensor,
        sine: torch.Tensor,
        attend: ops.Attend,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """``hidden`` ``[B, S, H]`` to the same; of a sparse layer its visits and mass too."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cosine, sine, attend)
        normalized = self.post_attention_layernorm(hidden)
        if isinstance(self.mlp, SparseMLP):
            output, visits, mass = self.mlp(normalized)
            return hidden + output, visits, mass
        return hidden + self.mlp(normalized), None, None
