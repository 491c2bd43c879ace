"""Floating-point operations of a model's matrix products, two for each multiplication and addition.

Backward takes twice as many as forward. Recomputation takes a layer's forward once more; the head
is never computed again, as its gradients are made in forward.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields
from functools import lru_cache

from shoal.models import DecoderConfig, Part


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Operations by kind."""

    dense: float = 0.0
    """Projections, dense MLPs, shared experts and routers."""
    attention: float = 0.0
    """Scores, and the sums of values weighted by them."""
    experts: float = 0.0
    """Routed experts."""
    head: float = 0.0
    again: float = 0.0
    """What recomputation repeats, of all kinds but attention."""
    attention_again: float = 0.0
    """Attention that it repeats."""

    def __add__(self, other: Work) -> Work:
        names = [field.name for field in fields(self)]
        return Work(**{name: getattr(self, name) + getattr(other, name) for name in names})

    def times(self, factor: float) -> Work:
        """As much, ``factor`` times."""
        return Work(**{field.name: factor * getattr(self, field.name) for field in fields(self)})

    @property
    def useful(self) -> float:
        """All but what is computed again."""
        return self.dense + self.attention + self.experts + self.head


@lru_cache(maxsize=4096)
def part_work(config: DecoderConfig, part: Part, seq_len: int, *, recompute: bool) -> Work:
    """Forward and backward of one token in a part, the mean over a sequence of ``seq_len``.

    Attention counts the keys that a token sees in a sequence of one document.
    """
    kinds = Counter((config.sparse_layers[i], config.windows[i]) for i in part.layers)
    forward = Work()
    for (is_sparse, window), count in kinds.items():
        forward += _layer_work(config, is_sparse, window, seq_len).times(count)
    again = forward if recompute else Work()
    head = 2.0 * config.vocab_size * config.hidden_size if part.is_last else 0.0
    return Work(
        dense=3 * forward.dense,
        attention=3 * forward.attention,
        experts=3 * forward.experts,
        head=3 * head,
        again=again.dense + again.experts,
        attention_again=again.attention,
    )


def _layer_work(config: DecoderConfig, is_sparse: bool, window: int | None, seq_len: int) -> Work:
    """Forward of one token in one layer."""
    hidden, queries = config.hidden_size, config.num_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    dense = 2.0 * hidden * (2 * queries + 2 * keys)
    experts = 0.0
    if is_sparse:
        assert config.experts is not None
        shape = config.experts
        experts = 6.0 * shape.experts_per_token * hidden * shape.intermediate_size
        dense += 2.0 * hidden * shape.num_experts
        dense += 6.0 * hidden * (shape.shared_intermediate_size or 0)
    else:
        dense += 6.0 * hidden * config.intermediate_size
    return Work(dense=dense, attention=4.0 * queries * _keys(window, seq_len), experts=experts)


def _keys(window: int | None, seq_len: int) -> float:
    """How many keys a token sees in the mean."""
    seen = seq_len if window is None else min(window, seq_len)
    return (seen * (seen + 1) / 2 + (seq_len - seen) * seen) / seq_len
