"""What exists only while a layer is in backward, beside what was kept for it.

Per token, with the letters of ``shoal.plan.activations`` and e' the wider of e and 4 bytes. Each
line is a moment; what earlier moments let go of what was kept is taken off. All but the first two
have the gradient of the layer's output beside them, eH::

    final norm           6 rows of H in fp32 (4 and a compute element on CPUs in bf16)
    attention            e(3Q + 4K) + 2eH; where ranks share sequences, 4Q more
    dense MLP            2eI: gradients of the gate's and of the up projection's output
    shared expert        2eS, or with a gate of its own at least 2eH
    combining experts    gradients of k rows and of their weights: 2e'kH; where e is less, 4H, and
                         the rows' in e: ekH, unless rows computed again were let go meanwhile
    moving rows          -ekH and their exchange between ranks: the rows combined are gone
    inside experts       2ekW - ekH: gradients around the activation
    before experts       -2ekW: gradients of gate, up projection and input; what came after is gone

Measured against torch's kernels on a CPU; those of CUDA fuse more, so that a GPU needs less.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.models import DecoderConfig
from shoal.plan.activations import FP32_BYTES, Kernels, shared_expert_bytes


def final_norm_bytes(config: DecoderConfig, kernels: Kernels, num_tokens: int) -> int:
    """While the final norm is in backward."""
    if kernels.fused_norm:
        return 3 * kernels.element_bytes * num_tokens * config.hidden_size
    rows = 6 * FP32_BYTES if kernels.element_bytes == FP32_BYTES else 5 * FP32_BYTES
    return rows * num_tokens * config.hidden_size


def attention_backward_bytes(
    config: DecoderConfig, kernels: Kernels, num_tokens: int, *, shares_sequences: bool
) -> int:
    """While a layer's attention is in backward."""
    e = kernels.element_bytes
    queries = config.num_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    summed = FP32_BYTES * queries if shares_sequences else 0
    return num_tokens * (e * (3 * queries + 4 * keys + 2 * config.hidden_size) + summed)


def mlp_backward_bytes(config: DecoderConfig, kernels: Kernels, num_tokens: int) -> int:
    """While a layer's dense MLP is in backward."""
    return num_tokens * kernels.element_bytes * (2 * config.intermediate_size + config.hidden_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureBackward:
    """Bytes while a mixture of experts is in backward, moment by moment."""

    shared: int | None
    """The expert that every token visits; None where there is none."""
    combining: int
    moving: int
    inside: int
    before: int

    @classmethod
    def of(
        cls, config: DecoderConfig, kernels: Kernels, num_tokens: int, *, recompute: bool
    ) -> MixtureBackward:
        """That of any of the sparse layers."""
        experts, e, hidden = config.experts, kernels.element_bytes, config.hidden_size
        assert experts is not None
        rows, width = e * experts.experts_per_token, experts.intermediate_size
        combining = 2 * FP32_BYTES * experts.experts_per_token * hidden
        if e < FP32_BYTES:
            combining += FP32_BYTES * hidden + (0 if recompute else rows * hidden)
        shared, around = None, e * hidden
        if experts.shared_intermediate_size is not None:
            inner = 2 * e * experts.shared_intermediate_size
            shared = around + max(inner, experts.shared_gate * 2 * e * hidden)
            # Its input's gradient waits for that of the others.
            around += e * hidden - shared_expert_bytes(experts, hidden, kernels)
        return cls(
            shared=None if shared is None else num_tokens * shared,
            combining=num_tokens * (combining + around),
            moving=num_tokens * (-rows * hidden + around),
            inside=num_tokens * (2 * rows * width - rows * hidden + around),
            before=num_tokens * (-2 * rows * width + around),
        )
