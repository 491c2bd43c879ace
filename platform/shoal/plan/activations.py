"""How many bytes of activations one rank keeps, from the shape of the model alone.

What autograd keeps for backward, per token, with e the bytes of a compute element, H the hidden
size, Q and K the widths of all query and of all key heads, I the width of the MLP, k experts of
width W a token::

    norm of width n      8n + 4 on a CPU (input and normalized input in fp32, the scale),
                         en + 4 on CUDA (its fused kernel keeps the input)
    attention            eH + e(2Q + 2K) + 4 heads, and the norms of queries and keys
    dense MLP            eH + 4eI
    mixture of experts   4H + 4E + 36k + 2ekH + 4ekW; a shared expert of width S: 2eH + 4eS + e,
                         where in fp32 its input is the router's and counts once; experts shared
                         by several ranks: 16k, with the rows of as many tokens as a rank has;
                         one without a gate: eH + e less; sigmoids scaled to one: 4k + 4
    layer                two norms of width H, attention, MLP

The masks of sliding windows and of packed documents, and what depends on the vocabulary, come on
top; the latter is ``head_bytes``. What else exists while a layer is in backward stands in
``shoal.plan.backward``.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.models import DecoderConfig, ExpertsConfig, Part
from shoal.models.families import QueryKeyNorm
from shoal.ops.cross_entropy import CHUNK_BYTES

FP32_BYTES = 4
INDEX_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """What the formulas depend on besides the model."""

    element_bytes: int
    """Bytes of one element in the compute format."""

    fused_norm: bool
    """Whether the norm's kernel keeps its input alone (CUDA)."""

    shared_experts: bool = False
    """Whether ranks share experts, and a rank's experts see the rows of others."""

    def norm(self, width: int, rows: int = 1) -> int:
        """Bytes that the norm of ``rows`` vectors of together ``width`` elements keeps."""
        kept = self.element_bytes if self.fused_norm else 2 * FP32_BYTES
        return kept * width + FP32_BYTES * rows


def kept_bytes(
    config: DecoderConfig, part: Part, kernels: Kernels, num_tokens: int, *, recompute: bool
) -> int:
    """Bytes that a part keeps of one microbatch from its forward to its backward."""
    kept = sum(layer_bytes(config, layer, kernels, num_tokens) for layer in part.layers)
    hidden = num_tokens * kernels.element_bytes * config.hidden_size
    if recompute:
        kept = len(part.layers) * hidden
    # What the last layer made is kept by the norm, or to be sent.
    return kept + (num_tokens * kernels.norm(config.hidden_size) if part.is_last else hidden)


def layer_bytes(config: DecoderConfig, layer: int, kernels: Kernels, num_tokens: int) -> int:
    """Bytes that one layer keeps for backward."""
    before = kernels.norm(config.hidden_size) + _attention(config, kernels)
    return num_tokens * before + mlp_bytes(config, layer, kernels, num_tokens)


def mlp_bytes(config: DecoderConfig, layer: int, kernels: Kernels, num_tokens: int) -> int:
    """Those of its MLP and of the norm before it, which backward lets go first."""
    hidden = config.hidden_size
    per_token = kernels.norm(hidden)
    if config.sparse_layers[layer]:
        assert config.experts is not None
        per_token += _experts(config.experts, hidden, kernels)
    else:
        per_token += kernels.element_bytes * (hidden + 4 * config.intermediate_size)
    return num_tokens * per_token


def head_bytes(config: DecoderConfig, element_bytes: int, num_tokens: int) -> int:
    """Bytes of the head and its loss: a chunk of logits, and the gradients computed ahead.

    A chunk exists in fp32, with as much again for its sums or its gradient.
    """
    vocabulary, hidden = config.vocab_size, config.hidden_size
    rows = min(num_tokens, max(CHUNK_BYTES // (FP32_BYTES * vocabulary), 1))
    logits = 2 * rows * vocabulary * FP32_BYTES
    input_and_gradient = 2 * element_bytes * num_tokens * hidden
    return logits + input_and_gradient + head_gradient_bytes(config)


def head_gradient_bytes(config: DecoderConfig) -> int:
    """Bytes of the gradient of the head's weight, summed up in fp32."""
    return FP32_BYTES * config.vocab_size * config.hidden_size


def shared_expert_bytes(experts: ExpertsConfig, hidden: int, kernels: Kernels) -> int:
    """Bytes that the expert which every token visits keeps of one; 0 where there is none."""
    e, width = kernels.element_bytes, experts.shared_intermediate_size
    if width is None:
        return 0
    is_input_kept = e != FP32_BYTES
    return e * (is_input_kept * hidden + 4 * width) + experts.shared_gate * e * (hidden + 1)


def exchange_bytes(config: DecoderConfig, element_bytes: int, num_tokens: int) -> int:
    """Bytes of one layer's rows on their way between ranks, as many arriving as leaving.

    They exist as they leave, in the transport, as they arrive, and in the order by expert.
    """
    if config.experts is None:
        return 0
    rows = num_tokens * config.experts.experts_per_token
    return 4 * rows * config.hidden_size * element_bytes


def _attention(config: DecoderConfig, kernels: Kernels) -> int:
    e, heads, keys = kernels.element_bytes, config.num_heads, config.num_key_value_heads
    q_width, k_width = heads * config.head_dim, keys * config.head_dim
    kept = e * config.hidden_size + e * (2 * q_width + 2 * k_width) + FP32_BYTES * heads
    match config.query_key_norm:
        case QueryKeyNorm.HEAD:
            kept += kernels.norm(q_width, heads) + kernels.norm(k_width, keys)
        case QueryKeyNorm.FULL:
            kept += kernels.norm(q_width) + kernels.norm(k_width)
        case QueryKeyNorm.NONE:
            pass
    return kept


def _experts(experts: ExpertsConfig, hidden: int, kernels: Kernels) -> int:
    e, k = kernels.element_bytes, experts.experts_per_token
    kept = FP32_BYTES * (hidden + experts.num_experts + k) + 4 * k * INDEX_BYTES
    kept += 2 * e * k * hidden + 4 * e * k * experts.intermediate_size
    if kernels.shared_experts:
        kept += 2 * k * INDEX_BYTES
    if experts.selection_bias and experts.normalize_weights:
        kept += FP32_BYTES * (k + 1)
    return kept + shared_expert_bytes(experts, hidden, kernels)
