"""What exists only while a layer is in backward, beside what was kept for it.

Per token, with the letters of ``shoal.plan.activations`` and e' the wider of e and 4 bytes. Each
line is a moment; what comes later in backward has let go of what an earlier part of it kept::

    final norm           6 rows of H in fp32 (4 and a compute element on CPUs in bf16)
    dense MLP            2eI of the gate's and the up projection's gradient, 3eH around them
    combining experts    gradients of k rows and of their weights: 2e'kH, with the rows' own where
                         e is less; 3eH around them, and H in fp32 likewise
    experts              2ekW + ekH, and 3eH around them
    attention            e(3Q + 4K) + 2eH; where ranks share sequences, 4Q more

Measured against torch's kernels on a CPU; those of CUDA fuse more, so that a GPU needs less.
"""

from __future__ import annotations

from shoal.models import DecoderConfig
from shoal.plan.activations import FP32_BYTES, Kernels


def final_norm_bytes(config: DecoderConfig, kernels: Kernels, num_tokens: int) -> int:
    """While the final norm is in backward."""
    if kernels.fused_norm:
        return 3 * kernels.element_bytes * num_tokens * config.hidden_size
    rows = 6 * FP32_BYTES if kernels.element_bytes == FP32_BYTES else 5 * FP32_BYTES
    return rows * num_tokens * config.hidden_size


def mlp_backward_bytes(config: DecoderConfig, layer: int, kernels: Kernels, num_tokens: int) -> int:
    """While a layer's MLP is in backward."""
    e, hidden = kernels.element_bytes, config.hidden_size
    if not config.sparse_layers[layer]:
        return num_tokens * e * (2 * config.intermediate_size + 3 * hidden)
    assert config.experts is not None
    k, width = config.experts.experts_per_token, config.experts.intermediate_size
    narrow = e < FP32_BYTES
    combining = 2 * FP32_BYTES * k * hidden + narrow * (e * k + FP32_BYTES) * hidden
    computing = e * k * (2 * width + hidden)
    shared = 2 * e * (config.experts.shared_intermediate_size or 0)
    return num_tokens * (max(combining, computing, shared) + 3 * e * hidden)


def attention_backward_bytes(
    config: DecoderConfig, kernels: Kernels, num_tokens: int, *, shares_sequences: bool
) -> int:
    """While a layer's attention is in backward."""
    e = kernels.element_bytes
    queries = config.num_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    summed = FP32_BYTES * queries if shares_sequences else 0
    return num_tokens * (e * (3 * queries + 4 * keys + 2 * config.hidden_size) + summed)
