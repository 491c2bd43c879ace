"""The attention layer: grouped queries, rotation, optional norms of queries and keys."""

from __future__ import annotations

import torch
from torch import nn

from shoal import ops
from shoal.models.config import DecoderConfig
from shoal.models.families import QueryKeyNorm
from shoal.models.linear import Linear
from shoal.models.norm import RMSNorm


class Attention(nn.Module):
    """Causal self-attention of layer ``layer``."""

    def __init__(self, config: DecoderConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.window = config.windows[layer]
        queries = config.num_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        hidden, bias = config.hidden_size, config.query_key_value_bias
        self.q_proj = Linear(hidden, queries, dtype, bias=bias)
        self.k_proj = Linear(hidden, keys, dtype, bias=bias)
        self.v_proj = Linear(hidden, keys, dtype, bias=bias)
        self.o_proj = Linear(queries, hidden, dtype, bias=config.output_bias)
        if config.query_key_norm is not QueryKeyNorm.NONE:
            per_head = config.query_key_norm is QueryKeyNorm.HEAD
            widths = (config.head_dim, config.head_dim) if per_head else (queries, keys)
            self.q_norm = RMSNorm(widths[0], config.rms_norm_eps, dtype)
            self.k_norm = RMSNorm(widths[1], config.rms_norm_eps, dtype)

    def forward(
        self,
        hidden: torch.Tensor,
        cosine: torch.Tensor,
        sine: torch.Tensor,
        attend: ops.Attend,
    ) -> torch.Tensor:
        """``hidden`` ``[B, S, H]`` to the same; ``cosine`` and ``sine`` ``[B or 1, S, D/2]``."""
        query, key, value = self._projections(hidden)
        attended = attend(
            ops.rotate(query, cosine, sine),
            ops.rotate(key, cosine, sine),
            value,
            window=self.window,
            dropout=self.config.attention_dropout if self.training else 0.0,
        )
        output: torch.Tensor = self.o_proj(attended.flatten(2))
        return output

    def _projections(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value, each ``[B, S, heads, D]``, before the rotation."""
        norm, clip = self.config.query_key_norm, self.config.clip_qkv
        heads = (-1, self.config.head_dim)
        query, key, value = self.q_proj(hidden), self.k_proj(hidden), self.v_proj(hidden)
        if norm is QueryKeyNorm.FULL:
            query, key = self.q_norm(query), self.k_norm(key)
        if clip is not None:
            query, key, value = (x.clamp(-clip, clip) for x in (query, key, value))
        query, key, value = (x.unflatten(-1, heads) for x in (query, key, value))
        if norm is QueryKeyNorm.HEAD:
            query, key = self.q_norm(query), self.k_norm(key)
        return query, key, value
