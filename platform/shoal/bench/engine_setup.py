"""What serving engines are compared on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_COMMON = {
    "head_dim": 64,
    "vocab_size": 32_000,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
    "bos_token_id": 0,
    "eos_token_id": 1,
}

DENSE: Mapping[str, Any] = _COMMON | {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}
"""184 million parameters."""

SPARSE: Mapping[str, Any] = _COMMON | {
    "model_type": "qwen3_moe",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 384,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
}
"""174 million parameters, 44 of them at work for a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests that all come at once, greedy, each of the same size."""

    name: str
    num_requests: int
    prompt_tokens: int
    new_tokens: int

    @property
    def counted_tokens(self) -> int:
        """What tokens/s counts: the answers, or the prompts where there is next to no answer."""
        per_request = self.new_tokens if self.new_tokens > 1 else self.prompt_tokens
        return self.num_requests * per_request


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBenchSetup:
    """Models, loads, rounds."""

    models: Mapping[str, Mapping[str, Any]] = field(
        default_factory=lambda: {"dense": DENSE, "MoE": SPARSE}
    )
    """Hugging Face configs by name; weights are random."""

    loads: tuple[Load, ...] = (
        Load(name="decode 1", num_requests=1, prompt_tokens=32, new_tokens=64),
        Load(name="decode 8", num_requests=8, prompt_tokens=32, new_tokens=64),
        Load(name="decode 32", num_requests=32, prompt_tokens=32, new_tokens=64),
        Load(name="prefill", num_requests=8, prompt_tokens=512, new_tokens=1),
    )

    threads: int = 2

    rounds: int = 5
    """Timed, each contender in turn; one more goes before to warm up."""

    settle_s: float = 1.0
    """Before each contender's turn: threads of OpenMP spin for a while after the turn of theirs."""
